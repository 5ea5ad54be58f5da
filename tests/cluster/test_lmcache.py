"""What `tandem render` prints of an endpoint whose prefillers push KV through LMCache, applied by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .endpoint import LONG, SHORT, Endpoint, applied, chunks, manifest
from .kube import Cluster


@pytest.fixture(scope="module")
def pushed(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One prefiller and one decoder."""
    resource = manifest("lmcache", "lmcache")
    with applied(cluster, resource, model, tmp_path_factory.mktemp("endpoint")) as endpoint:
        yield endpoint


def test_the_kv_of_long_prompts_is_pushed(pushed: Endpoint) -> None:
    short, long = pushed.ask(SHORT), pushed.ask(LONG)
    assert len(pushed.routed(short)) == 1
    assert "prefill time (TTFT)" in pushed.routed(long)[0]
    with pushed.stream(LONG) as reply:
        assert len(list(chunks(reply))) > 1
    assert long.json()["usage"]["completion_tokens"] == 8
    tokens = long.json()["usage"]["prompt_tokens"]
    (decoder,) = pushed.pods("decode")
    assert re.search(rf"Retrieved {tokens} out of {tokens}.*throughput", pushed.log(decoder, "decode-pushed"))


def test_each_role_says_what_it_is(pushed: Endpoint) -> None:
    for role, said in (("prefill", "sender"), ("decode", "receiver")):
        (pod,) = pushed.pods(role)
        logged = pushed.log(pod, f"{role}-pushed")
        assert set(re.findall(r"'pd_role': '[a-z]+'", logged)) == {f"'pd_role': '{said}'"}
