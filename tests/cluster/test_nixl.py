"""What `tandem render` prints of a disaggregated endpoint, applied by hand: it answers, through losses too.

Rollouts are the operator's, whose tests change what is deployed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .endpoint import LONG, SHORT, SYSTEM, Cut, Endpoint, address, applied, chunks, manifest
from .kube import Cluster, Object
from .load import load

ENGINE, COLLECTOR = 8000, 8889
HIDDEN = (
    "/sim/state",
    "/sim/faults",
    "/load",
    "/kv_event_sources",
    "/tandem/model/",
    "/tandem/model/vocab.txt",
)
"""Paths that engines have and nobody shall reach, and files that are none of the tokenizer's."""


@pytest.fixture(scope="module")
def pair(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """Two prefillers and two decoders, over NIXL."""
    resource = manifest("nixl", "nixl", model)
    with applied(cluster, resource, model, tmp_path_factory.mktemp("endpoint")) as endpoint:
        yield endpoint


def test_short_prompts_go_to_a_decoder_and_long_ones_to_a_prefiller_first(pair: Endpoint) -> None:
    short, long = pair.ask(SHORT), pair.ask(LONG)
    assert short.json()["usage"]["completion_tokens"] == long.json()["usage"]["completion_tokens"] == 8
    decoders = [f"to decoder {address(pod)} " for pod in pair.pods("decode")]
    prefillers = [f" to {address(pod)} " for pod in pair.pods("prefill")]
    (only,) = pair.routed(short)
    assert any(decoder in only for decoder in decoders)
    timed, first, second = pair.routed(long)
    assert "prefill time (TTFT)" in timed
    assert any(prefiller in first for prefiller in prefillers)
    assert any(decoder in second for decoder in decoders)


def test_the_router_serves_inference_and_nothing_else(pair: Endpoint) -> None:
    http = pair.cluster.http
    assert http.get(f"{pair.url}/ping").status_code == 200
    assert [model["id"] for model in http.get(f"{pair.url}/v1/models").json()["data"]] == [pair.model]
    for path in (*HIDDEN, "/engines", "/metrics", "/tandem/model/config.json"):
        assert http.get(f"{pair.url}{path}").status_code == 404, path
    assert http.post(f"{pair.url}/admin/route", json=pair.body(SHORT)).status_code == 404


def test_answers_are_streamed_as_they_come(pair: Endpoint) -> None:
    with pair.stream(LONG, max_tokens=20) as reply:
        streamed = list(chunks(reply))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed)
    assert len(streamed) > 20
    assert text == pair.ask(LONG, max_tokens=20).json()["choices"][0]["message"]["content"]
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


def test_pods_on_two_nodes_hand_over(pair: Endpoint) -> None:
    for role in ("prefill", "decode"):
        assert len({pod["spec"]["nodeName"] for pod in pair.pods(role)}) == 2


def test_the_proxy_lets_through_what_is_for_others(pair: Endpoint, model: Path) -> None:
    http = pair.cluster.http
    for pod in (*pair.pods("prefill"), *pair.pods("decode")):
        assert http.get(f"{address(pod)}/ping").status_code == 200
        assert http.get(f"{address(pod)}/health").status_code == 200
        for file in model.iterdir():
            served = http.get(f"{address(pod)}/tandem/model/{file.name}")
            assert (served.status_code, served.content) == (200, file.read_bytes())
        for path in HIDDEN:
            assert http.get(f"{address(pod)}{path}").status_code == 404, path
        posted = http.post(f"{address(pod)}/tandem/model/config.json", json={})
        assert posted.status_code in (403, 405)


def test_the_collectors_offer_the_figures_of_engines_proxies_and_router(pair: Endpoint) -> None:
    wanted = {
        "prefill": ("vllm:num_requests_running", "nginx_connections_active"),
        "decode": ("vllm:num_requests_running", "nginx_connections_active"),
        "router": ("tandem_",),
    }
    for component, names in wanted.items():
        for pod in pair.pods(component):

            def offered(pod: Object = pod, names: tuple[str, ...] = names) -> bool:
                page = pair.cluster.http.get(f"{address(pod, COLLECTOR)}/metrics").text
                return all(name in page for name in names) and pod["metadata"]["name"] in page

            pair.cluster.wait_for(f"figures of {pod['metadata']['name']}", offered, 30)


def test_containers_run_without_root_on_a_root_that_is_read_only(pair: Endpoint) -> None:
    for component in ("prefill", "router"):
        pod = pair.pods(component)[0]
        for container in pod["spec"]["containers"]:
            words = ("-n", pod["metadata"]["namespace"], pod["metadata"]["name"], "-c", container["name"])
            probe = "id -u; touch /here 2>&1; grep ^CapEff /proc/self/status"
            user, touched, capabilities = pair.cluster.kubectl(
                "exec", *words, "--", "sh", "-c", probe
            ).splitlines()
            assert int(user) > 0
            assert "Read-only file system" in touched
            assert capabilities.split() == ["CapEff:", "0" * 16]


def test_budgets_let_one_pod_of_a_kind_leave(pair: Endpoint) -> None:
    for namespace, name, pods in (
        (pair.namespace, "prefill-pair", 2),
        (pair.namespace, "decode-pair", 2),
        (SYSTEM, "pair-nixl-router", 1),
    ):
        path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}"

        def counted(path: str = path, pods: int = pods) -> bool:
            status = pair.cluster.get(path)["status"]
            return bool(status["currentHealthy"] == pods and status["disruptionsAllowed"] == 1)

        pair.cluster.wait_for(f"the budget {name}", counted)


def test_pods_that_are_deleted_take_no_request_with_them(pair: Endpoint) -> None:
    before = pair.engines()
    gone = {pair.pods(role)[0]["metadata"]["name"] for role in ("prefill", "decode")}
    with load(pair) as seen:
        pair.cluster.wait_for("answers", lambda: seen.answers(8))
        pair.cluster.kubectl("delete", "pod", "-n", pair.namespace, *gone, "--wait=false")
        pair.cluster.wait_for("other pods", lambda: not pair.engines() & gone and pair.settled(), 60)
        done = seen.answered
        pair.cluster.wait_for("answers after that", lambda: seen.answers(done + 8))
    assert seen.failed == seen.cut == []
    assert pair.engines() - before


def test_a_crash_takes_only_streams_with_it_that_had_begun(pair: Endpoint) -> None:
    with load(pair) as seen:
        pair.cluster.wait_for("answers", lambda: seen.answers(8))
        with pair.stream(SHORT, max_tokens=500) as reply:
            begun = chunks(reply)
            next(begun)
            (line,) = pair.routed(reply)
            decoder = next(pod for pod in pair.pods("decode") if f"{address(pod)} " in line)
            for pod in (decoder, pair.pods("prefill")[0]):
                told = pair.cluster.http.post(f"{address(pod, ENGINE)}/sim/faults", content="crash")
                assert told.status_code == 200
            with pytest.raises(Cut):
                list(begun)
        pair.cluster.wait_for("a loss", lambda: not pair.settled())
        pair.cluster.wait_for("the engines", pair.settled)
        done = seen.answered
        pair.cluster.wait_for("answers after that", lambda: seen.answers(done + 8))
    assert seen.failed == []
    assert all("streamed" in cut for cut in seen.cut)
