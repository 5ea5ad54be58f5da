"""What runs beneath an endpoint fails or leaves: its operator, the API server, a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tandem.operator.process.leader import LEASE_SECONDS

from .endpoint import LONG, SYSTEM
from .kube import Cluster
from .load import load
from .operating import LEASE, LEASES, OPERATOR, Managed, Operator, has_room, holder, nixl_pair, watching


@pytest.fixture(scope="module")
def pair(cluster: Cluster, operator: Operator, model: Path) -> Iterator[Managed]:
    with nixl_pair(cluster, "faults", model, metrics=True) as endpoint:
        yield endpoint


def signalled(cluster: Cluster, signal: str, pattern: str) -> None:
    """Send a signal to processes of the cluster's own namespace, by their command line."""
    script = f'pids=$(pgrep -f "$1") && kill -{signal} $pids'
    done = cluster.run("sh", "-c", script, "sh", pattern)
    assert done.returncode == 0, done.stderr


def own_cluster(cluster: Cluster) -> None:
    if cluster.make_image is None:
        pytest.skip("the processes of a cluster that was given are not ours")


def flags(endpoint: Managed, *args: str) -> None:
    """Have the prefillers started with other flags."""
    endpoint.resource["spec"]["pdSpec"]["prefillSpec"]["args"] = list(args)
    endpoint.apply()


def test_of_two_operators_one_leads_and_when_it_goes_another_at_once(
    cluster: Cluster, operator: Operator
) -> None:
    """Mostly the one that stood by, which is of no matter; but never two, and none takes it from another."""
    scale = ("scale", "deployment", OPERATOR, "-n", SYSTEM)
    cluster.kubectl(*scale, "--replicas=2")
    looks: list[list[str]] = []

    def leading() -> list[str]:
        looks.append(operator.leading())
        return looks[-1]

    try:
        cluster.wait_for("two operators", lambda: operator.ready(2), 90)
        first = operator.holder()
        cluster.wait_for("its own word", lambda: leading() == [first])
        with watching(cluster, LEASES, fieldSelector=f"metadata.name={LEASE}") as lease:
            cluster.kubectl("delete", "pod", first, "-n", SYSTEM, "--wait=false")
            # Given back, it is taken long before it would run out.
            cluster.wait_for("another leader", lambda: leading() not in ([], [first]), float(LEASE_SECONDS))
            cluster.wait_for("two operators", lambda: leading() and operator.ready(2), 90)
            second = operator.holder()
            cluster.wait_for("its own word", lambda: leading() == [second])
            cluster.wait_for("the watch", lambda: second in lease.values(holder))
        assert lease.values(holder) == [first, "", second]
        assert max(map(len, looks)) == 1
    finally:
        cluster.kubectl(*scale, "--replicas=1")
    cluster.wait_for("one operator", lambda: operator.ready() and operator.leads(), 60)


def test_an_operator_that_goes_midway_is_followed_by_another(pair: Managed, operator: Operator) -> None:
    flags(pair, "--max-num-seqs", "16")
    pair.cluster.wait_for("a rollout", lambda: pair.state() == "DeploymentInProgress")
    (pod,) = operator.pods()
    pair.cluster.kubectl("delete", "pod", "-n", SYSTEM, pod["metadata"]["name"], "--wait=false")
    flags(pair, "--max-num-seqs", "17")
    pair.cluster.wait_for("the endpoint", pair.complete, 120)
    (prefiller, _) = pair.pods("prefill")
    args = prefiller["spec"]["containers"][0]["args"]
    assert args[args.index("--max-num-seqs") + 1] == "17"
    assert operator.leads()


def test_an_api_server_that_is_away_stops_no_request(pair: Managed, operator: Operator) -> None:
    cluster = pair.cluster
    own_cluster(cluster)
    (before,) = operator.pods()

    def answers() -> bool:
        try:
            return cluster.api.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    with load(pair) as seen:
        cluster.wait_for("answers", lambda: seen.answers(8))
        signalled(cluster, "KILL", "^kube-apiserver ")
        answered = seen.answered
        cluster.wait_for("the API server", answers, 60)
        flags(pair, "--max-num-seqs", "18")
        cluster.wait_for("the endpoint", pair.complete, 120)
    assert seen.failed == seen.cut == []
    assert seen.answered > answered
    cluster.wait_for("the operator", lambda: operator.ready() and operator.leads())
    (after,) = operator.pods()
    assert after["metadata"]["name"] == before["metadata"]["name"]


@contextmanager
def drained(cluster: Cluster, node: str) -> Iterator[None]:
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=110s")
    cluster.kubectl("drain", node, *words)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", node)


def test_a_node_is_drained_without_a_failed_request(pair: Managed) -> None:
    has_room(pair.cluster)  # all of it on the other node
    (router,) = pair.pods("router")
    node = router["spec"]["nodeName"]
    with load(pair) as seen:
        pair.cluster.wait_for("answers", lambda: seen.answers(8))
        with drained(pair.cluster, node):
            pair.cluster.wait_for("the endpoint", lambda: pair.settled() and pair.complete(), 120)
            done = seen.answered
            pair.cluster.wait_for("answers after that", lambda: seen.answers(done + 8))
            where = {pod["spec"]["nodeName"] for role in ("prefill", "decode") for pod in pair.pods(role)}
            assert where.isdisjoint({node})
    assert seen.failed == seen.cut == []


def test_a_node_that_is_lost_is_told_and_the_rest_serves(pair: Managed) -> None:
    """Its kubelet stops; whoever needs its pods learns that from the API server."""
    cluster = pair.cluster
    own_cluster(cluster)
    # The drain has left everything on one node: a pod of each role goes back to the other.
    for role in ("prefill", "decode"):
        pod = pair.pods(role)[0]["metadata"]["name"]
        cluster.kubectl("delete", "pod", "-n", pair.namespace, pod, "--grace-period=0", "--force")
    cluster.wait_for("the endpoint", lambda: pair.settled() and pair.complete())
    (router,) = pair.pods("router")
    lost = {"node-1": "node-2", "node-2": "node-1"}[router["spec"]["nodeName"]]
    assert any(pod["spec"]["nodeName"] == lost for role in ("prefill", "decode") for pod in pair.pods(role))
    kubelet = f"^kubelet .*hostname-override={lost}"
    signalled(cluster, "STOP", kubelet)
    try:

        def told() -> bool:
            ready = pair.status()["conditions"][0]
            words = f"NodeNotReady: node {lost} is not ready"
            return (
                ready["status"] == "True" and ready["reason"] == "PodsMissing" and words in ready["message"]
            )

        cluster.wait_for("the loss in the status", told)
        assert pair.ask(f"lost {LONG}").status_code == 200
    finally:
        signalled(cluster, "CONT", kubelet)
    cluster.wait_for(
        "the endpoint", lambda: pair.settled() and pair.status()["conditions"][0]["reason"] == "Deployed"
    )
