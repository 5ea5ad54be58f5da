"""The status tells over what KV goes; engines' logs are read for it once, and a few times more while they
tell nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, cast

import pytest

from tandem.kube import ApiError, Client, KubeError, Object
from tandem.operator.control.engine_logs import AFTER_SECONDS, MOST_READ, EngineLogs
from tandem.operator.control.status import Outcome, Wanted

from .conftest import World
from .test_transport import PEER, READ, WRITE_MANY, started, table, whole

TOLD = started() + table(PEER, READ, whole("tcp/eth0"))
ENDPOINT: Object = {"metadata": {"name": "x", "namespace": "team-a", "generation": 3}}


def outcome(connector: str | None = "nixl") -> Outcome:
    wanted = tuple(Wanted(name, ("team-a", f"{name}-x")) for name in ("prefill", "decode"))
    transfer = connector and {"connector": connector, "reason": "asked for"}
    return Outcome(wanted=wanted, transfer=transfer or None)


def pod(name: str, component: str = "decode", *, ready: bool = True, start: int = 0) -> Object:
    containers = [
        {"name": "sidecar-reverse-proxy", "containerID": f"containerd://{name}-proxy"},
        {"name": f"{component}-x", "containerID": f"containerd://{name}-{start}"},
    ]
    return {
        "metadata": {"name": name, "namespace": "team-a", "labels": {"tandem.dev/component": component}},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": containers,
        },
    }


@dataclass
class Cluster:
    """Pods' logs, a clock, and which have been read."""

    logs: dict[str, str | KubeError] = field(default_factory=dict)
    time: datetime = datetime(2026, 11, 30, 4, 0, tzinfo=UTC)
    read: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engines = EngineLogs(cast("Client", self), lambda: self.time)

    async def log(self, pod: str, namespace: str, container: str, *, most_bytes: int) -> str:
        self.read.append((pod, container))
        answer = self.logs.get(pod, started())
        if isinstance(answer, KubeError):
            raise answer
        return answer[:most_bytes]

    async def transport(
        self, *pods: Object, of: Outcome | None = None, before: dict[str, Any] | None = None
    ) -> tuple[str, float | None]:
        made, again = await self.engines.look(ENDPOINT, of or outcome(), pods, before or {})
        assert made.transfer is not None
        return made.transfer["transport"], again


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_a_log_that_tells_is_read_once_for_each_start(cluster: Cluster) -> None:
    cluster.logs["d1"] = TOLD
    for start in (0, 0, 1, 1):
        assert await cluster.transport(pod("d1", start=start)) == ("TCP (tcp/eth0)", None)
    assert cluster.read == [("d1", "decode-x")] * 2


async def test_those_that_move_kv_are_asked(cluster: Cluster) -> None:
    """Decoders fetch it over NIXL; prefillers push it through LMCache."""
    pods = pod("p1", "prefill"), pod("d1")
    cluster.logs = {"p1": table(PEER, WRITE_MANY, whole("cma/memory")), "d1": TOLD}
    assert (await cluster.transport(*pods))[0] == "TCP (tcp/eth0)"
    told, _ = await Cluster(cluster.logs).transport(*pods, of=outcome("lmcache"))
    assert told == "shared memory (cma/memory)"


async def test_nothing_is_read_of_a_colocated_endpoint(cluster: Cluster) -> None:
    colocated = outcome(None)
    assert await cluster.engines.look(ENDPOINT, colocated, [pod("d1")], {}) == (colocated, None)
    assert cluster.read == []


async def test_an_engine_that_tells_nothing_yet_is_asked_again_and_then_no_more(cluster: Cluster) -> None:
    told, again = await cluster.transport(pod("d1"))
    assert told == "unknown: no decode engine has logged one yet"
    for before, after in pairwise(AFTER_SECONDS):
        assert again == after - before
        cluster.time += timedelta(seconds=again / 2)
        await cluster.transport(pod("d1"))  # something else has changed
        cluster.time += timedelta(seconds=again / 2)
        told, again = await cluster.transport(pod("d1"))
    assert (len(cluster.read), again) == (len(AFTER_SECONDS), None)
    assert told.startswith("unknown: no decode engine has logged one; UCX does with UCX_PROTO_INFO")
    cluster.time += timedelta(days=1)
    await cluster.transport(pod("d1"))
    assert len(cluster.read) == len(AFTER_SECONDS)


async def test_its_first_hand_off_is_seen(cluster: Cluster) -> None:
    _, again = await cluster.transport(pod("d1"))
    assert again is not None
    cluster.time += timedelta(seconds=again)
    cluster.logs["d1"] = TOLD
    assert await cluster.transport(pod("d1")) == ("TCP (tcp/eth0)", None)


async def test_engines_that_are_not_ready_are_not_asked(cluster: Cluster) -> None:
    assert await cluster.transport(pod("d1", ready=False)) == ("unknown: no decode engine is ready", None)
    assert cluster.read == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ApiError(403, "Forbidden", "pods/log is forbidden"), "pods/log is forbidden"),
        (KubeError("GET …: timed out"), "GET …: timed out"),
    ],
)
async def test_a_log_that_cannot_be_read_is_told_and_fails_no_pass(
    cluster: Cluster, error: KubeError, said: str
) -> None:
    cluster.logs["d1"] = error
    told, again = await cluster.transport(pod("d1"))
    assert told == f"unknown: the logs of decode engines cannot be read: {said}"
    assert again is not None
    cluster.logs["d1"] = TOLD
    cluster.time += timedelta(seconds=again)
    assert await cluster.transport(pod("d1")) == ("TCP (tcp/eth0)", None)


async def test_of_many_engines_some_are_read_in_a_pass(cluster: Cluster) -> None:
    pods = [pod(f"d{i}") for i in range(2 * MOST_READ + 1)]
    cluster.logs = dict.fromkeys((p["metadata"]["name"] for p in pods), TOLD)
    read = []
    again: float | None = 0.0
    while again is not None:
        told, again = await cluster.transport(*pods)
        assert told == "TCP (tcp/eth0)"
        read.append(len(cluster.read))
    assert read == [MOST_READ, 2 * MOST_READ, 2 * MOST_READ + 1]


async def test_what_was_told_stays_when_the_operator_starts_anew(cluster: Cluster) -> None:
    """The beginning of the log may be gone by then. It holds for the endpoint as it was told of."""
    before = {"observedGeneration": 3, "transfer": {"transport": "TCP (tcp/eth0)"}}
    assert (await cluster.transport(pod("d1"), before=before))[0] == "TCP (tcp/eth0)"
    for other in (
        before | {"observedGeneration": 2},
        before | {"transfer": {"transport": "unknown: no decode engine is ready"}},
        before | {"transfer": {"connector": "nixl"}},
    ):
        assert (await cluster.transport(pod("d1"), before=other))[0].startswith(
            "unknown: no decode engine has"
        )


async def test_engines_that_have_gone_are_forgotten(cluster: Cluster) -> None:
    cluster.logs = {"d1": TOLD, "d2": started()}
    await cluster.transport(pod("d1"))
    assert (await cluster.transport(pod("d2")))[0].startswith("unknown")
    cluster.engines.forget(("team-a", "x"))
    await cluster.transport(pod("d1"))
    assert [name for name, _ in cluster.read] == ["d1", "d2", "d1"]


async def test_the_status_has_it_or_says_why_not(world: World) -> None:
    """No kubelet runs beside this API server, so no log is to be had."""
    await world.apply(world.manifest())
    await world.deployed()

    async def told() -> str:
        return str((await world.endpoint())["status"].get("transfer", {}).get("transport"))

    async def none_ready() -> bool:
        return await told() == "unknown: no decode engine is ready"

    async def unreadable() -> bool:
        return (await told()).startswith("unknown: the logs of decode engines cannot be read: ")

    await world.until(none_ready, "no pod")
    template = (await world.objects())["Deployment/decode-pd-hf"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    container = {"name": "decode-pd-hf", "image": "x"}
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "decode-1", "namespace": world.namespace, "labels": labels},
        "spec": {"nodeName": "nowhere", "containers": [container]},
    }
    await world.apply(made)
    state = {"name": "decode-pd-hf", "containerID": "containerd://1", "ready": True, "restartCount": 0}
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [state | {"image": "x", "imageID": "x"}],
    }
    words = ("pod", "decode-1", "-n", world.namespace, "--subresource=status", "--type=merge", "-p")
    await world.kubectl("patch", *words, json.dumps({"status": status}))
    await world.until(unreadable, "a pod without a log")
