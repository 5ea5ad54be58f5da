"""What `tandem render` prints of an endpoint of real engines, applied by hand: vLLM's CPU build in pods on
two nodes, KV over NIXL across the pods' network."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.bench.chat import LIKELY
from tandem.bench.equality import compare
from tandem.bench.proof import long_prompt
from tandem.bench.scrape import EngineCounters, read_counters
from tandem.local import paths
from tandem.local.builtin import builtin_model
from tandem.operator.control.transport import transports

from .endpoint import Endpoint, address, applied, manifest
from .kube import Cluster, Object

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ENGINE = 8000
START_SECONDS = 600
"""Two engines start at once, with 20 to 30 s of a core each; others may use the machine, and count as much as
all of the cluster."""
LONG_TOKENS, ANSWER_TOKENS = 400, 16


@pytest.fixture(scope="module")
def real(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A prefiller and a decoder with SmolLM2-135M."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM's CPU build beside these tests: make dev")
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    shutil.copytree(builtin_model(paths.model_cache(), sys.executable), folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    cluster.image("vllm/vllm-openai-cpu:v0.32.0", "vllm-cpu", "serve")
    resource = manifest("real", "real", folder)
    made = applied(cluster, resource, None, tmp_path_factory.mktemp("endpoint"), seconds=START_SECONDS)
    with made as endpoint:
        yield endpoint


def test_the_decoders_log_tells_over_what_the_kv_came(real: Endpoint) -> None:
    """As soon as the router uses the pair: it has sent KV across by then."""
    (decoder,) = real.pods("decode")
    (told,) = transports(real.log(decoder, "decode-real"), "read")
    assert told.startswith("TCP (tcp/")


def test_long_prompts_cross_two_nodes_and_short_ones_stay_on_the_decoder(real: Endpoint) -> None:
    (prefiller,), (decoder,) = real.pods("prefill"), real.pods("decode")
    assert prefiller["spec"]["nodeName"] != decoder["spec"]["nodeName"]
    short = sent(real, "The capital of France is")
    assert short.prefill == EngineCounters()
    assert short.decode.computed_tokens == short.answer.prompt_tokens
    long = sent(real, long_prompt(secrets.token_hex(8), tokens=LONG_TOKENS))
    tokens = long.answer.prompt_tokens
    assert tokens > LONG_TOKENS
    assert long.prefill.computed_tokens == tokens
    assert long.decode.received_tokens + long.decode.cached_tokens == tokens
    assert long.decode.computed_tokens == 0
    assert long.decode.kv_bytes > 20_000 * tokens  # 22.5 KiB a token
    print(f"{long.decode.kv_bytes / 1e6:.1f} MB in {long.decode.kv_seconds * 1000:.0f} ms")


@pytest.mark.parametrize("tokens", [LONG_TOKENS, 2 * LONG_TOKENS])
def test_disaggregated_answers_are_the_decoders_own(real: Endpoint, tokens: int) -> None:
    prompt = long_prompt(secrets.token_hex(8), tokens=tokens)
    handed_over = sent(real, prompt)
    assert handed_over.decode.computed_tokens == 0
    (decoder,) = real.pods("decode")
    alone = sent(real, prompt, at=address(decoder), cache_salt="alone")
    assert alone.decode.computed_tokens == alone.answer.prompt_tokens
    same = compare(handed_over.answer.ids, alone.answer.ids, alone.answer.likely)
    print(f"{alone.answer.prompt_tokens} tokens: {same}")
    assert same.acceptable


def test_without_its_prefiller_the_endpoint_answers_until_there_is_another(real: Endpoint) -> None:
    (gone,) = real.pods("prefill")
    name = gone["metadata"]["name"]
    words = ("pod", name, "-n", real.namespace, "--grace-period=0", "--force", "--wait=false")
    real.cluster.kubectl("delete", *words)
    assert len(complete(real, real.url, long_prompt("gone", tokens=LONG_TOKENS)).ids) == ANSWER_TOKENS
    real.wait_until_in_use(START_SECONDS)
    (new,) = real.pods("prefill")
    assert new["metadata"]["name"] != name

    def handed_over() -> bool:
        """By the new pair, which is used once the router has seen KV go across it."""
        seen = sent(real, long_prompt(secrets.token_hex(8), tokens=LONG_TOKENS))
        return seen.decode.received_tokens > 0

    real.cluster.wait_for("a hand-off by the new prefiller", handed_over)


@dataclass(frozen=True)
class Answer:
    """Greedy, of ANSWER_TOKENS."""

    ids: list[int]
    likely: list[dict[int, float]]
    prompt_tokens: int


@dataclass(frozen=True)
class Sent:
    answer: Answer
    prefill: EngineCounters
    """How far the prefiller's counters grew."""
    decode: EngineCounters


def sent(endpoint: Endpoint, prompt: str, *, at: str | None = None, **fields: Any) -> Sent:
    """Send a prompt to the router, or to an engine, and see what the engines did for it."""
    pods = [endpoint.pods(role)[0] for role in ("prefill", "decode")]
    before = [counters(endpoint, pod) for pod in pods]
    answer = complete(endpoint, at or endpoint.url, prompt, **fields)

    def settled() -> Sent | None:
        """Engines write their counters a little after an answer."""
        prefill, decode = (counters(endpoint, pod).since(old) for pod, old in zip(pods, before, strict=True))
        alone = decode.computed_tokens >= answer.prompt_tokens
        both = prefill.prompt_tokens >= answer.prompt_tokens and decode.kv_transfers > 0
        whole = decode.prompt_tokens >= answer.prompt_tokens and (alone or both)
        return Sent(answer, prefill, decode) if whole else None

    return endpoint.cluster.wait_for("the engines' counters", settled, 15)


def complete(endpoint: Endpoint, url: str, prompt: str, **fields: Any) -> Answer:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": LIKELY,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **fields,
    }
    reply = endpoint.cluster.http.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    data = reply.json()
    choice = data["choices"][0]
    likely = [
        {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}
        for top in choice["logprobs"]["top_logprobs"]
    ]
    return Answer(choice["token_ids"], likely, data["usage"]["prompt_tokens"])


def counters(endpoint: Endpoint, pod: Object) -> EngineCounters:
    page = endpoint.cluster.http.get(f"{address(pod, ENGINE)}/metrics")
    assert page.status_code == 200
    return read_counters(page.text)
