"""An endpoint that is changed, hurt and deleted while the operator looks after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .endpoint import LONG, SHORT, SYSTEM
from .kube import Cluster
from .load import load
from .operating import LEASE, LEASES, Managed, Operator, nixl_pair, watching


@pytest.fixture(scope="module")
def pair(cluster: Cluster, operator: Operator, model: Path) -> Iterator[Managed]:
    with nixl_pair(cluster, "changes", model, metrics=False) as endpoint:
        yield endpoint


def threshold(endpoint: Managed) -> str:
    """That of a request asked now, as the router's log has it."""
    assert endpoint.ask(SHORT).status_code == 200
    (router,) = endpoint.pods("router")
    lines = [x for x in endpoint.log(router, "router-container").splitlines() if "threshold=" in x]
    return lines[-1].partition("threshold=")[2].partition(",")[0]


def test_over_what_kv_goes_is_told_from_what_engines_log(pair: Managed) -> None:
    def told() -> bool:
        return pair.status().get("transfer", {}).get("transport") == "TCP (tcp/eth0)"

    pair.cluster.wait_for("the transport", told)


def test_at_rest_the_lease_is_renewed_and_nothing_else_is_asked(pair: Managed, operator: Operator) -> None:
    def rests() -> bool:
        """A GET and a PUT for each renewal. Watches are opened again each five minutes, so not always."""
        with watching(pair.cluster, LEASES, fieldSelector=f"metadata.name={LEASE}") as seen:
            pair.cluster.wait_for("a renewal", lambda: len(seen.objects) > 1)
            first, before = len(seen.objects), operator.requests()
            pair.cluster.wait_for("three renewals", lambda: len(seen.objects) >= first + 3)
            return operator.requests() - before == 6

    pair.cluster.wait_for("rest", rests)


def test_a_role_is_scaled(pair: Managed) -> None:
    before = pair.engines()
    pair.resource["spec"]["pdSpec"]["prefillSpec"]["replicas"] = 3
    pair.apply()
    pair.cluster.wait_for("three prefillers", lambda: pair.complete() and len(pair.pods("prefill")) == 3)
    assert before < pair.engines()
    assert pair.status()["roles"]["prefill"]["summary"] == "3/3"


def test_pods_that_are_killed_come_back(pair: Managed) -> None:
    before = pair.engines()
    gone = {pair.pods(role)[0]["metadata"]["name"] for role in ("prefill", "decode")}
    pair.cluster.kubectl("delete", "pod", "-n", pair.namespace, *gone, "--grace-period=0", "--force")
    pair.cluster.wait_for("other pods", lambda: pair.settled() and not pair.engines() & gone, 60)
    assert len(pair.engines()) == len(before)
    assert pair.state() == "DeploymentComplete", "a pod that comes back is no new deployment"
    assert pair.ask(LONG).status_code == 200


def test_another_threshold_and_other_flags_fail_no_request(pair: Managed) -> None:
    before = pair.engines()
    with load(pair) as seen:
        pair.cluster.wait_for("answers", lambda: seen.answers(8))
        pair.resource["spec"]["pdSpec"]["routingThreshold"] = 100
        pair.resource["spec"]["pdSpec"]["prefillSpec"]["args"] = ["--max-num-seqs", "16"]
        pair.resource["spec"]["pdSpec"]["decodingSpec"]["args"] = ["--max-num-seqs", "32"]
        pair.apply()
        pair.cluster.wait_for("the new engines", pair.complete, 200)
        rolled = seen.answered
        pair.cluster.wait_for("answers after that", lambda: seen.answers(rolled + 8))
    assert seen.failed == seen.cut == []
    assert not pair.engines() & before
    assert threshold(pair) == "100"


def test_it_becomes_colocated_and_disaggregated_again(pair: Managed) -> None:
    spec = pair.resource["spec"]
    split = spec.pop("pdSpec")
    spec["replicas"] = 1
    spec["worker"]["resources"] = split["decodingSpec"]["resources"]
    pair.cluster.kubectl("apply", "-f", "-", stdin=[pair.resource])

    def colocated() -> bool:
        return pair.complete() and set(pair.status()["roles"]) == {"worker"}

    pair.cluster.wait_for("one engine", colocated, 90)
    service = f"http://{pair.name}.{pair.namespace}.svc.cluster.local/v1/chat/completions"
    assert pair.cluster.http.post(service, json=pair.body(LONG)).status_code == 200
    spec["pdSpec"] = split
    pair.apply()
    pair.cluster.wait_for("both roles", lambda: pair.complete() and "prefill" in pair.status()["roles"], 90)
    reply = pair.ask(f"again {LONG}")
    assert "prefill time" in "".join(pair.routed(reply))


def test_deleting_it_leaves_nothing(pair: Managed) -> None:
    pair.delete("--wait=false")
    pair.cluster.wait_for("nothing left", lambda: not pair.left(), 120)
    assert pair.cluster.pods(SYSTEM, f"tandem.dev/endpoint={pair.name}") == []
