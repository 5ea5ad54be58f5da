"""Operators as processes that are killed, frozen and left without an API server, beside Kubernetes' own
controllers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import yaml

from tandem.api.crd import NAME, crd
from tandem.kube import Object
from tandem.kube import resources as kinds
from tandem.operator import render
from tandem.operator.names import WEBHOOK
from tandem.operator.process.alone import HYPERPOD_DEPLOYMENT
from tandem.operator.process.leader import RENEWED
from tandem.operator.process.run import LEASE

from ...api.conftest import REPOSITORY, _assets, _free_ports
from ..endpoints import ROUTER_NAMESPACE, SETTINGS, endpoint
from .plane import Cluster, Operator, Plane, cluster, plane, until

pytestmark = pytest.mark.timeout(400)  # the first one waits for the servers

LEASE_SECONDS = 6
"""Of the operators here, who need not be waited for as long as others."""
LEASES = f"--lease-seconds={LEASE_SECONDS}"
RENEW_SECONDS = LEASE_SECONDS * RENEWED
TAKEN_OVER_SECONDS = LEASE_SECONDS + 2 * RENEW_SECONDS + 15
"""In the worst case, on a machine that is busy."""


@pytest.fixture(scope="module")
def one_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    with plane(_assets(), tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture
async def kube(one_plane: Plane) -> AsyncIterator[Cluster]:
    async with cluster(one_plane) as made:
        # One that was killed would be waited for.
        await made.client.delete(kinds.LEASE, LEASE, ROUTER_NAMESPACE)
        yield made


@pytest.fixture
async def namespace(kube: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    name = f"t{abs(hash(request.node.name)) % 10**10}"
    await kube.namespace(name)
    yield name
    await kube.forget(name)


def wanted(namespace: str, *names: str) -> set[str]:
    """The objects of such endpoints."""
    return {
        f"{o['kind']}/{o['metadata']['name']}"
        for name in names
        for o in render(
            endpoint("dpd-nixl", {"metadata.namespace": namespace, "metadata.name": name}), SETTINGS
        ).objects
    }


def versions(objects: dict[str, Object]) -> dict[str, str]:
    return {name: found["metadata"]["resourceVersion"] for name, found in objects.items()}


def written(objects: dict[str, Object]) -> dict[str, object]:
    """What there is of the operators' own writing, and how often it was another."""
    return {
        name: (o["metadata"].get("generation"), o.get("spec"), o.get("data")) for name, o in objects.items()
    }


def deployments(objects: dict[str, Object]) -> int:
    return sum(name.startswith("Deployment/") for name in objects)


NAMES = [f"e{number}" for number in range(6)]


async def test_what_one_operator_has_begun_when_it_is_killed_the_next_one_finishes(
    kube: Cluster, namespace: str
) -> None:
    for name in NAMES:
        await kube.apply(namespace, name)

    async def midway() -> bool:
        return deployments(await kube.objects(namespace)) >= 2

    with kube.plane.operator("--no-leader-elect") as first:
        await until("some deployments", midway)
        first.kill()
    begun = await kube.objects(namespace)
    assert begun.keys() < wanted(namespace, *NAMES), "it was killed under way"
    with kube.plane.operator("--no-leader-elect"):

        async def whole() -> bool:
            return (await kube.objects(namespace)).keys() >= wanted(namespace, *NAMES)

        await until("all objects", whole)

        async def told() -> bool:
            return all(await kube.states(namespace))

        await until("their states", told)
    found = await kube.objects(namespace)
    assert found.keys() == wanted(namespace, *NAMES)
    for name, there in begun.items():
        assert found[name]["metadata"]["uid"] == there["metadata"]["uid"], "none was made twice"


@asynccontextmanager
async def two_operators(kube: Cluster) -> AsyncIterator[tuple[Operator, Operator]]:
    """One that leads, and one that stands by."""
    with kube.plane.operator(LEASES, name="one") as one:
        await until("one leads", one.leads)
        with kube.plane.operator(LEASES, name="two") as two:
            await until("two stands by", lambda: "waiting" in two.log)
            yield one, two


@pytest.mark.slow
async def test_of_two_operators_the_other_goes_on_when_one_is_killed(kube: Cluster, namespace: str) -> None:
    async with two_operators(kube) as (one, two):
        await kube.apply(namespace, "a")

        async def made(name: str) -> bool:
            return (await kube.objects(namespace)).keys() >= wanted(namespace, name)

        await until("the objects", lambda: made("a"))
        writes = two.requests()
        assert (writes["patch"], writes["create"], writes["delete"]) == (0, 0, 0)
        one.kill()
        assert await until("two leads", two.leads, TAKEN_OVER_SECONDS) > LEASE_SECONDS - RENEW_SECONDS - 1
        await kube.apply(namespace, "b")
        await until("the objects", lambda: made("b"))


async def test_an_operator_that_is_told_to_end_leaves_the_lease_to_the_one_that_waits(kube: Cluster) -> None:
    """At once, and so not to one that starts only then, as a pod that is made in its place."""
    async with two_operators(kube) as (one, two):
        one.process.terminate()
        with kube.plane.operator(LEASES, name="three") as three:
            assert one.process.wait(20) == 0
            await until("two leads", two.leads, LEASE_SECONDS - 1)
            await until("three stands by", lambda: "waiting" in three.log)
            assert two.leads()


@pytest.mark.slow
async def test_a_leader_that_was_frozen_writes_nothing_after_another_took_over(
    kube: Cluster, namespace: str
) -> None:
    with kube.plane.operator(LEASES, name="one") as one:
        await until("one leads", one.leads)
        for name in NAMES:
            await kube.apply(namespace, name)

        async def midway() -> bool:
            return deployments(await kube.objects(namespace)) >= 2

        await until("some deployments", midway)
        one.freeze()
        assert (await kube.objects(namespace)).keys() < wanted(namespace, *NAMES), "frozen under way"
        with kube.plane.operator(LEASES, name="two") as two:
            await until("two leads", two.leads, TAKEN_OVER_SECONDS)
            for name in NAMES:  # what the first one has in mind is out of date now
                await kube.patch(namespace, name, {"pdSpec": {"decodingSpec": {"replicas": 3}}})

            async def scaled() -> bool:
                found = await kube.objects(namespace)
                decoders = [found.get(f"Deployment/decode-{name}", {}) for name in NAMES]
                return all(d.get("spec", {}).get("replicas") == 3 for d in decoders) and (
                    found.keys() == wanted(namespace, *NAMES)
                )

            await until("three decoders each", scaled)
            await resting(two)
            before = written(await kube.objects(namespace))
            one.thaw()
            await until("one stands by", lambda: "stands by" in one.log)
            assert "nothing is written" in one.log
            await resting(two)
            assert written(await kube.objects(namespace)) == before
            assert not one.leads()
            assert one.metrics()["tandem_operator_endpoints"] == 0
            two.kill()
            await until("one leads again", one.leads, TAKEN_OVER_SECONDS)


async def resting(operator: Operator) -> None:
    """Until it has sent nothing but what holds the lease for two seconds."""

    async def rests() -> bool:
        before = operator.requests()
        await asyncio.sleep(2)
        now = operator.requests()
        return bool(now) and all(now[verb] == before[verb] for verb in ("patch", "create", "delete", "list"))

    await until("rest", rests)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--leader-elect", "--no-leader-elect"])
async def test_an_api_server_that_is_away_is_outlived(kube: Cluster, namespace: str, flag: str) -> None:
    """The version from which a watch would go on is unknown to the new server (410): it is listed anew."""
    with kube.plane.operator(flag, LEASES) as operator:
        await kube.apply(namespace, "a")

        async def made() -> bool:
            return (await kube.objects(namespace)).keys() >= wanted(namespace, "a")

        await until("the objects", made)
        await resting(operator)
        before = versions(await kube.objects(namespace))
        away = kube.plane.server.away()
        await asyncio.to_thread(away.__enter__)
        if flag == "--leader-elect":
            await until("it leads no longer", lambda: not operator.leads(), LEASE_SECONDS + 5)
        assert operator.process.poll() is None
        await asyncio.to_thread(away.__exit__, None, None, None)
        await kube.patch(namespace, "a", {"pdSpec": {"decodingSpec": {"replicas": 2}}})

        async def scaled() -> bool:
            return bool((await kube.objects(namespace))["Deployment/decode-a"]["spec"]["replicas"] == 2)

        await until("two decoders", scaled, 45)
        assert operator.process.poll() is None
        if flag == "--no-leader-elect":
            assert "they are listed anew" in operator.log
        await resting(operator)
        after = versions(await kube.objects(namespace))
        deployed = {name for name in after if name.startswith("Deployment/")}
        budgets = {name for name in after if name.startswith("PodDisruptionBudget/")}  # a controller's
        changed = {name for name in after if after[name] != before[name]} - deployed - budgets
        assert not changed, "what was as it should be was not written again"
        assert "Traceback" not in operator.log


@pytest.mark.slow
async def test_a_namespace_that_is_deleted_goes_with_what_its_endpoints_have_elsewhere(
    kube: Cluster, namespace: str
) -> None:
    with kube.plane.operator("--no-leader-elect") as operator:
        for name in NAMES:
            await kube.apply(namespace, name)

        async def some() -> bool:
            return deployments(await kube.objects(namespace)) >= 4

        await until("some deployments", some)
        before = operator.requests()
        await kube.kubectl("delete", "namespace", namespace, "--wait=false")

        async def gone() -> bool:
            found = await kube.client.get(kinds.NAMESPACE, namespace)
            return found is None and not await kube.objects(namespace)

        await until("the namespace to go", gone, 90)
        await resting(operator)
        sent = {verb: count - before[verb] for verb, count in operator.requests().items()}
        assert sent["patch"] < 40 * len(NAMES), "it does not try for ever"
        assert sent["create"] < 10 * len(NAMES)
        assert "Traceback" not in operator.log


async def ended(operator: Operator) -> tuple[int, str]:
    code = await asyncio.to_thread(operator.process.wait, 60)
    return code, operator.log


async def test_a_definition_of_another_owner_is_not_worked_on_unless_told_to(
    kube: Cluster, namespace: str
) -> None:
    patch = '{"metadata":{"labels":{"app.kubernetes.io/name":"hyperpod"}}}'
    await kube.kubectl("patch", "crd", NAME, "--type=merge", "-p", patch)
    try:
        with kube.plane.operator() as operator:
            code, said = await ended(operator)
            assert code == 3
            assert f"the definition {NAME} belongs to another owner" in said
            assert "--take-over" in said
            assert "Traceback" not in said
        with kube.plane.operator("--take-over", "--no-leader-elect") as operator:
            await kube.apply(namespace, "a")

            async def made() -> bool:
                return (await kube.objects(namespace)).keys() >= wanted(namespace, "a")

            await until("the objects", made)
    finally:
        await asyncio.to_thread(kube.plane.server.install, crd())


async def test_beside_another_operator_it_does_not_work_unless_told_to(kube: Cluster, namespace: str) -> None:
    labels = {"control-plane": "controller-manager"}
    theirs = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": HYPERPOD_DEPLOYMENT, "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "manager", "image": "x"}]},
            },
        },
    }
    await kube.client.create(theirs, kinds.DEPLOYMENT, manager="helm")
    system = f"--system-namespace={namespace}"
    with kube.plane.operator(system) as operator:
        code, said = await ended(operator)
        assert code == 3
        assert f"another operator is installed: Deployment {namespace}/{HYPERPOD_DEPLOYMENT}" in said
        assert "--take-over" in said
    with kube.plane.operator(system, "--take-over") as operator:
        await until("it leads", operator.leads)


@pytest.mark.slow
async def test_without_a_definition_it_says_what_to_do(kube: Cluster, namespace: str) -> None:
    await kube.kubectl("delete", "crd", NAME)
    try:
        with kube.plane.operator() as operator:
            code, said = await ended(operator)
            assert code == 3
            assert "tandem crd | kubectl apply" in said
    finally:
        await asyncio.to_thread(kube.plane.server.install, crd())


@pytest.mark.slow
async def test_the_webhooks_certificate_comes_back_into_what_is_applied_again(kube: Cluster) -> None:
    async def conversion() -> str:
        definition = await kube.client.get(kinds.DEFINITION, NAME)
        assert definition is not None
        return str(definition["spec"]["conversion"]["strategy"])

    async def by_webhook() -> bool:
        return await conversion() == "Webhook"

    async def trusted() -> bool:
        found = await kube.client.get(kinds.VALIDATING_WEBHOOK, WEBHOOK)
        assert found is not None
        return all("caBundle" in hook["clientConfig"] for hook in found["webhooks"])

    definition = crd()
    webhook = yaml.safe_load((REPOSITORY / "deploy/webhook.yaml").read_text("utf-8"))
    try:
        with kube.plane.operator(f"--webhook-port={_free_ports(1)[0]}") as operator:
            await until("it leads", operator.leads)
            await until("the certificate", by_webhook)
            await until("its watches", lambda: "watching" in operator.log)
            await asyncio.to_thread(kube.plane.server.install, definition)
            assert await by_webhook(), "who applies it leaves the conversion alone"
            await kube.kubectl("replace", "-f", "-", stdin=definition)
            await until("the certificate", by_webhook)
            # Also where it comes later than the operator.
            await kube.kubectl("create", "-f", "-", stdin=webhook)
            await until("the certificate", trusted, 10)
            await kube.kubectl("replace", "-f", "-", stdin=webhook)
            await until("the certificate", trusted, 10)
    finally:
        await kube.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=webhook)
        await kube.kubectl("replace", "-f", "-", stdin=definition)


@pytest.mark.slow
async def test_a_definition_that_another_owner_puts_in_place_of_ours_is_left_alone(
    kube: Cluster, namespace: str
) -> None:
    theirs = crd()
    theirs["metadata"]["labels"] = {"app.kubernetes.io/name": "hyperpod"}
    try:
        with kube.plane.operator(f"--webhook-port={_free_ports(1)[0]}") as operator:
            await until("it leads", operator.leads)
            await until("its watches", lambda: "watching" in operator.log)
            await kube.kubectl("replace", "-f", "-", stdin=theirs)
            code, said = await ended(operator)
            assert code == 3
            assert f"the definition {NAME} belongs to another owner" in said
            assert "Traceback" not in said
        definition = await kube.client.get(kinds.DEFINITION, NAME)
        assert definition is not None
        assert definition["spec"]["conversion"]["strategy"] == "None", "nothing was written into it"
    finally:
        await kube.kubectl("replace", "-f", "-", stdin=crd())
