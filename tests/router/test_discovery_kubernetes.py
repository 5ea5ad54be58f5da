"""Engines that are pods: which are, what they are, and what an API server in trouble does to them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig, Subscription
from tandem.http import serve
from tandem.kube import NoCluster, Object
from tandem.router.app import running
from tandem.router.discovery import Member, MergedDiscovery, discovery
from tandem.router.discovery.kubernetes import KubernetesDiscovery
from tandem.router.engines import EngineRole, State

from ..kube.fakes import AWAY, OPEN, TOO_OLD, Api, Time, bookmark, listing, pod
from .fakes import FakeEngine, eventually

ROLE = "inference.sagemaker.aws.amazon.com/dpd-role"
READY = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]


def engine(name: str, version: int, address: str = "10.0.0.1", **more: Any) -> Object:
    """A pod that serves; `more`: see `pod`."""
    return pod(name, version, **{"status": {"podIP": address, "conditions": READY}, **more})


def leaving(found: Object, version: int) -> Object:
    """The pod once its end is decided."""
    changed = {"resourceVersion": str(version), "deletionTimestamp": "2026-01-01T00:00:00Z"}
    return {**found, "metadata": {**found["metadata"], **changed}}


class Followed:
    """What the discovery of `ns:8081:app=m` tells, beside an API server whose answers a test gives."""

    def __init__(self, port: int = 8081, **options: Any) -> None:
        self.api = Api()
        self.time = Time()
        self.clusters: list[NoCluster | None] = []
        """What the next attempts to find a cluster come to; then one is found."""
        self.source = KubernetesDiscovery(
            "ns",
            port,
            "app=m",
            connect=self._connect,
            clock=self.time.clock,
            sleep=self.time.sleep,
            **options,
        )
        self.told: list[frozenset[Member]] = []

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Api]:
        if self.clusters and (error := self.clusters.pop(0)) is not None:
            raise error
        yield self.api

    async def follow(self) -> None:
        async for members in self.source.watch():
            self.told.append(members)

    async def answers(self, *answers: Any) -> None:
        await self.api.answers(*answers)
        for _ in range(5):  # what was taken is told a little later
            await asyncio.sleep(0)

    @property
    def urls(self) -> set[str]:
        return {member.url for member in self.told[-1]}

    @property
    def member(self) -> Member:
        (member,) = self.told[-1]
        return member


@asynccontextmanager
async def following(**options: Any) -> AsyncIterator[Followed]:
    followed = Followed(**options)
    task = asyncio.create_task(followed.follow())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_is_what_its_pod_says() -> None:
    labels = {
        ROLE: "prefill",
        "app": "m",
        "pod-template-hash": "6c54bd5869",
        "tandem.dev/kv-layout": "0a1b2c3d4e",
        "topology.kubernetes.io/zone": "us-east-2a",
    }
    config = RouterConfig(engine=("http://e:1",), kv_events="tcp://*:5557", kv_replay="tcp://*:6557")
    async with following(subscriptions=config.subscription) as f:
        made = engine("p", 3, "10.0.0.7", uid="u-1", labels=labels, spec={"nodeName": "node-1"})
        await f.answers(listing(10, made))
        assert f.member == Member(
            "http://10.0.0.7:8081",
            EngineRole.PREFILL,
            uid="u-1",
            labels=(
                ("kv-layout", "0a1b2c3d4e"),
                ("node", "node-1"),
                ("revision", "6c54bd5869"),
                ("zone", "us-east-2a"),
            ),
            kv_events=Subscription("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557"),
        )


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({ROLE: "prefill"}, EngineRole.PREFILL),
        ({ROLE: "decode"}, EngineRole.DECODE),
        ({"app": "m"}, EngineRole.BOTH),
        (None, EngineRole.BOTH),
    ],
)
async def test_a_pod_without_a_role_serves_whole_requests(labels: Any, role: EngineRole) -> None:
    async with following() as f:
        await f.answers(listing(10, engine("p", 3, labels=labels)))
        assert f.member.role is role


async def test_an_ipv6_address_stands_in_brackets() -> None:
    config = RouterConfig(engine=("http://e:1",), kv_events="tcp://*:5557")
    async with following(subscriptions=config.subscription) as f:
        await f.answers(listing(10, engine("p", 3, "fd00::7")))
        assert f.member.url == "http://[fd00::7]:8081"
        assert f.member.kv_events == Subscription("tcp://[fd00::7]:5557")


NOT_YET: dict[str, Any] = {
    "no status": {"status": None},
    "no address": {"status": {"conditions": READY}},
    "an empty address": {"status": {"podIP": "", "conditions": READY}},
    "no conditions": {"status": {"podIP": "10.0.0.1"}},
    "conditions that are null": {"status": {"podIP": "10.0.0.1", "conditions": None}},
    "not ready": {"status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "False"}]}},
    "unknown": {"status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "Unknown"}]}},
    "another condition": {
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "ContainersReady", "status": "True"}]}
    },
}


@pytest.mark.parametrize("why", NOT_YET)
async def test_a_pod_is_an_engine_while_it_is_ready_and_no_longer(why: str) -> None:
    waiting = {**engine("p", 3), **NOT_YET[why]}
    async with following() as f:
        await f.answers(listing(10, waiting), OPEN)
        assert f.told == [frozenset()]
        assert f.source.trouble == "none of the pods (1) is ready; there are none"
        await f.answers(("MODIFIED", engine("p", 11)))
        assert f.urls == {"http://10.0.0.1:8081"}
        assert f.source.trouble is None
        await f.answers(("MODIFIED", {**waiting, "metadata": engine("p", 12)["metadata"]}))
        assert f.told[-1] == frozenset()


async def test_a_pod_that_is_to_end_leaves_before_it_ends() -> None:
    one, two = engine("a", 1, "10.0.0.1"), engine("b", 2, "10.0.0.2")
    async with following() as f:
        await f.answers(listing(10, one, two), OPEN)
        assert f.urls == {"http://10.0.0.1:8081", "http://10.0.0.2:8081"}
        await f.answers(("MODIFIED", leaving(one, 11)))
        assert f.urls == {"http://10.0.0.2:8081"}
        await f.answers(("DELETED", leaving(one, 12)))
        assert len(f.told) == 2, "its end is no news"


async def test_what_changes_nothing_of_an_engine_is_not_told() -> None:
    async with following() as f:
        await f.answers(listing(10, engine("p", 3)), OPEN)
        await f.answers(("MODIFIED", engine("p", 11, labels={"note": "x"})), bookmark(20))
        assert len(f.told) == 1


async def test_another_pod_of_the_same_name_and_address_is_another_engine() -> None:
    async with following() as f:
        await f.answers(listing(10, engine("p-0", 3, uid="first")), OPEN)
        first = f.member
        await f.answers(("DELETED", engine("p-0", 11, uid="first")))
        await f.answers(("ADDED", engine("p-0", 12, uid="second")))
        assert (f.member.url, f.member.uid) == (first.url, "second")
        assert f.member != first


async def test_of_pods_that_claim_one_address_the_newest_has_it() -> None:
    def at(name: str, version: int, created: str) -> Object:
        made = engine(name, version)
        made["metadata"]["creationTimestamp"] = created
        return made

    old, new = at("b", 1, "2026-01-01T00:00:00Z"), at("a", 2, "2026-01-02T00:00:00Z")
    for order in ((old, new), (new, old)):
        async with following() as f:
            await f.answers(listing(10, *order))
            assert f.member.uid == "uid-a"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "role": (
        {"labels": {ROLE: "prefil"}},
        f"pod bad: its label {ROLE} is 'prefil', not prefill or decode",
    ),
    "address": ({"status": {"podIP": "nowhere", "conditions": READY}}, "pod bad: 'nowhere' does not appear"),
    "a label's type": ({"labels": {ROLE: 7}}, "pod bad: Expected `str`, got `int` - at `$.metadata.labels"),
    "status": ({"status": "Ready"}, "pod bad: Expected `object | null`, got `str` - at `$.status`"),
    "conditions": ({"status": {"conditions": "Ready"}}, "pod bad: Expected `array | null`, got `str`"),
    "a condition": (
        {"status": {"conditions": [{"type": "Ready"}]}},
        "pod bad: Object missing required field",
    ),
    "node": (
        {"spec": {"nodeName": {}}},
        "pod bad: Expected `str | null`, got `object` - at `$.spec.nodeName`",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_pod_that_makes_no_sense_is_told_and_the_others_are_used(
    mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    more, said = MISTAKES[mistake]
    async with following() as f:
        await f.answers(listing(10, engine("bad", 3, "10.0.0.9", **more), engine("good", 4)), OPEN)
        assert f.urls == {"http://10.0.0.1:8081"}
        assert f.source.trouble is not None
        assert f.source.trouble.startswith(said)
        assert f.source.trouble.endswith("; those found stay in use")
        assert caplog.messages == [f"engines that are pods of ns with app=m: {f.source.trouble}"]
        await f.answers(("DELETED", pod("bad", 11)))
        assert f.source.trouble is None


async def test_mistakes_of_a_thousand_pods_are_not_all_told() -> None:
    async with following() as f:
        await f.answers(listing(10, *(engine(f"p{n}", n, "nowhere") for n in range(1000))))
        assert f.source.trouble is not None
        assert "; and 997 more; there are none" in f.source.trouble


async def test_more_pods_than_can_be_meant_change_nothing() -> None:
    async with following(limit=2) as f:
        await f.answers(listing(10, engine("a", 1, "10.0.0.1"), engine("b", 2, "10.0.0.2")), OPEN)
        await f.answers(("ADDED", engine("c", 11, "10.0.0.3")))
        assert f.urls == {"http://10.0.0.1:8081", "http://10.0.0.2:8081"}
        assert f.source.trouble == "there are more than 2 pods; those found stay in use"
        await f.answers(("DELETED", engine("a", 12, "10.0.0.1")))
        assert f.urls == {"http://10.0.0.2:8081", "http://10.0.0.3:8081"}
        assert f.source.trouble is None


async def test_nothing_is_told_before_the_pods_have_been_listed() -> None:
    async with following() as f:
        await f.answers(AWAY, AWAY)
        assert f.told == []
        assert f.source.trouble == "the API server: connection refused; there are none"
        assert f.source.missing == (
            "the engines are not known yet: the API server: connection refused; there are none"
        )
        assert f.source.age == float("inf")
        await f.answers(listing(10))
        assert f.told == [frozenset()]
        assert f.source.trouble == "there is no such pod; there are none"
        assert (f.source.missing, f.source.age) == (None, 0)


async def test_engines_stay_while_the_api_server_is_away_and_their_news_age() -> None:
    async with following(stale_after=120.0) as f:
        await f.answers(listing(10, engine("p", 3)), OPEN)
        f.time.now += 119
        assert f.source.missing is None
        f.time.now += 2
        assert f.source.missing == (
            "what is known of the engines is more than 120 s old: the API server is silent"
        )
        await f.answers(*[AWAY] * 20)
        assert max(f.time.slept) <= 5.0, "after an outage it is heard again soon"
        assert f.source.missing == (
            "what is known of the engines is more than 120 s old: the API server: connection refused; "
            "those found stay in use"
        )
        assert (len(f.told), f.urls) == (1, {"http://10.0.0.1:8081"})
        await f.answers(OPEN)
        assert (f.source.missing, f.source.trouble, f.source.age) == (None, None, 0)


async def test_another_list_takes_no_engine_away_that_is_still_there() -> None:
    one, two = engine("a", 1, "10.0.0.1"), engine("b", 2, "10.0.0.2")
    async with following() as f:
        await f.answers(listing(10, one, two), OPEN, TOO_OLD)
        assert f.source.missing is None
        await f.answers(listing(90, one, two), OPEN)
        assert len(f.told) == 1
        await f.answers(TOO_OLD, listing(95, two), OPEN)
        assert f.urls == {"http://10.0.0.2:8081"}


async def test_a_cluster_that_is_not_found_is_looked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed()
    followed.clusters = [NoCluster("no kubeconfig"), NoCluster("no kubeconfig"), None]
    watching = aiter(followed.source.watch())
    following = asyncio.ensure_future(anext(watching))
    while not followed.time.slept:
        await asyncio.sleep(0)
    assert followed.source.trouble == "no cluster: no kubeconfig; there are none"
    assert (
        followed.source.missing == "the engines are not known yet: no cluster: no kubeconfig; there are none"
    )
    followed.api.give(listing(10, engine("p", 3)))
    assert len(await following) == 1
    assert followed.source.trouble is None
    assert followed.time.slept == [5.0, 5.0]
    assert len(caplog.messages) == 1


async def test_a_mistake_of_the_watch_ends_it_and_who_watches_again_has_all() -> None:
    followed = Followed()
    followed.api.give(listing(10, engine("p", 3)), OPEN)
    watching = aiter(followed.source.watch())
    first = await anext(watching)
    followed.api.give(RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        await anext(watching)
    assert followed.source.missing is None
    followed.api.give(listing(20, engine("p", 3)))
    again = aiter(followed.source.watch())
    assert await anext(again) == first
    await again.aclose()  # type: ignore[attr-defined]


# In a router


def test_the_flag_names_the_source_and_takes_time_only_where_it_is_used() -> None:
    """The client of the API server is imported where pods are followed, and nowhere else."""
    check = (
        "import sys, tandem.router.app as app\n"
        "from tandem.config import RouterConfig\n"
        "app.discovery_of(RouterConfig(discover_dns=('both=e.svc:1',)))\n"
        "assert 'lightkube' not in sys.modules\n"
        "found = app.discovery_of(RouterConfig(discover_kubernetes='models:8081:app=llama'))\n"
        "assert 'lightkube' in sys.modules\n"
        "print(found.sources()[0].name)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Kubernetes models:8081:app=llama\n"), done.stderr


async def test_the_flags_say_where_and_when_news_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    api = Api()

    @asynccontextmanager
    async def connect() -> AsyncIterator[Api]:
        yield api

    async def listed(resource: Any, namespace: str, **more: Any) -> Any:
        asked.update(more, namespace=namespace)
        return listing(10, engine("p", 3))

    monkeypatch.setattr(api, "list", listed)
    defaults = KubernetesDiscovery.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "connect", connect)
    config = RouterConfig(
        discover_kubernetes="models:9000:app in (a,b),!canary",
        discovery_stale_after=1000.0,
        kv_events="tcp://*:5557",
    )
    merged = discovery(config)
    assert merged.missing == "the engines are not known yet: the API server has not listed their pods"
    watching = aiter(merged.watch())
    (member,) = await anext(watching)
    assert (member.url, member.kv_events) == ("http://10.0.0.1:9000", Subscription("tcp://10.0.0.1:5557"))
    assert (asked["namespace"], asked["labels"]) == ("models", "app in (a,b),!canary")
    assert merged.missing is None
    await watching.aclose()  # type: ignore[attr-defined]


@asynccontextmanager
async def router(followed: Followed, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A router whose engines are the pods followed."""
    config = RouterConfig(port=0, engine=("http://127.0.0.1:1",), log_level="error", **options)
    source = MergedDiscovery({"Kubernetes ns:8081:app=m": followed.source})
    async with (
        running(config, None, discovery=source, waiting_interval=0.02) as (server, app),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        yield client, app


async def test_a_router_is_ready_while_its_news_are_new_and_serves_on_when_they_are_not() -> None:
    fake = FakeEngine("a")
    fake.server = await serve(fake, "127.0.0.1", 0)
    followed = Followed(port=fake.server.port)
    async with router(followed) as (client, _):

        async def told() -> tuple[int, str | None]:
            answer = await client.get("/ready")
            return answer.status_code, answer.json()["reason"]

        async def age() -> float:
            name = 'tandem_discovery_age_seconds{source="Kubernetes ns:8081:app=m"}'
            lines = (await client.get("/metrics")).text.splitlines()
            return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))

        unknown = "the engines are not known yet: the API server has not listed their pods"
        assert await told() == (503, unknown)
        assert await age() == float("inf")
        await followed.answers(listing(10, engine("p", 3, "127.0.0.1")), OPEN)

        async def in_use() -> bool:
            return (await told())[0] == 200

        await eventually(in_use)
        followed.time.now += 130
        assert await age() == 130
        old = "what is known of the engines is more than 120 s old: the API server is silent"
        assert await told() == (503, old)
        assert (await client.get("/health")).status_code == 200
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 8})
        assert answer.status_code == 200
        await followed.answers(bookmark(20))
        assert await told() == (200, None)
    await fake.server.close()


async def test_the_public_port_says_no_more_than_that_news_are_old() -> None:
    followed = Followed()
    async with router(followed, admin_port=0) as (client, app):
        await followed.answers(AWAY)
        assert (await client.get("/ready")).json()["reason"] == "the engines are not known yet"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.admin.port}") as admin:
            (source,) = (await admin.get("/engines")).json()["sources"]
    assert source == {
        "name": "Kubernetes ns:8081:app=m",
        "engines": 0,
        "trouble": "the API server: connection refused; there are none",
        "age": None,
    }


async def test_pods_of_another_layout_never_pair_and_those_of_another_revision_do() -> None:
    followed = Followed()

    def labelled(name: str, role: str, address: str, layout: str, revision: str) -> Object:
        labels = {ROLE: role, "tandem.dev/kv-layout": layout, "pod-template-hash": revision}
        return engine(name, 1, address, labels=labels)

    config = RouterConfig(discover_kubernetes="ns:8081:app=m", port=0, log_level="error")
    source = MergedDiscovery({"Kubernetes": followed.source})
    async with running(config, None, discovery=source) as (_, app):
        await followed.answers(
            listing(
                10,
                labelled("p-old", "prefill", "127.0.0.2", "one", "r1"),
                labelled("p-new", "prefill", "127.0.0.3", "two", "r2"),
                labelled("d-old", "decode", "127.0.0.4", "one", "r3"),
                labelled("d-new", "decode", "127.0.0.5", "one", "r4"),
            )
        )
        await eventually(lambda: _count(app, 4))
        of = {e.url.rsplit(".", 1)[1]: e for e in app.fleet.engines}
        pairs = {
            (p[0], d[0])
            for p in ("2:8081", "3:8081")
            for d in ("4:8081", "5:8081")
            if app.fleet.may_pair(of[p], of[d])
        }
        assert pairs == {("2", "4"), ("2", "5")}
        assert all(e.state is State.WAITING for e in app.fleet.engines)


async def _count(app: Any, number: int) -> bool:
    return len(app.fleet.engines) == number
