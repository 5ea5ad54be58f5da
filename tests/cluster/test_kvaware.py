"""What `tandem render` prints of a colocated endpoint whose router reads KV events, applied by hand; and that
it can be taken away again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .endpoint import ENDPOINT, LONG, Endpoint, address, applied, manifest
from .kube import Cluster, Object


@pytest.fixture(scope="module")
def whole(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """Two engines without roles."""
    resource = manifest("kvaware", "kvaware")
    with applied(cluster, resource, model, tmp_path_factory.mktemp("endpoint")) as endpoint:
        yield endpoint


def found(endpoint: Endpoint, worker: Object, prompt: str) -> bool:
    """Whether a prompt that a worker was asked without the router's knowledge comes back to that worker."""
    chat = f"{address(worker)}/v1/chat/completions"
    assert endpoint.cluster.http.post(chat, json=endpoint.body(prompt)).status_code == 200
    reply = endpoint.ask(prompt)
    assert reply.status_code == 200, reply.text
    cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    (line,) = endpoint.routed(reply)
    assert (f" {address(worker)} " in line) == (cached > 100)
    return bool(cached > 100)


def test_prompts_go_where_events_say_that_their_kv_is(whole: Endpoint) -> None:
    one, other = whole.pods("worker")
    tries = iter(range(1000))
    for worker in (one, other):
        whole.cluster.wait_for("events", lambda worker=worker: found(whole, worker, f"{next(tries)} {LONG}"))
    for i in range(3):
        assert found(whole, one, f"one {i} {LONG}")
        assert found(whole, other, f"other {i} {LONG}")


def test_deleting_what_was_applied_leaves_nothing(whole: Endpoint) -> None:
    kinds = whole.cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith("events")]
    every = (",".join(kinds), "-A", "-l", f"{ENDPOINT}={whole.name}", "-o", "name", "--ignore-not-found")
    assert len(whole.cluster.kubectl("get", *every).split()) > 15
    whole.delete()
    whole.cluster.wait_for("nothing left", lambda: not whole.cluster.kubectl("get", *every).split(), 90)
    ended_badly = whole.cluster.get("/api/v1/events", fieldSelector="reason=FailedPreStopHook")["items"]
    assert [event["involvedObject"]["name"] for event in ended_badly] == []
