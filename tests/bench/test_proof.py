"""The proof holds for an endpoint that disaggregates, and fails for one that only seems to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.proof import Proof, ProofError, long_prompt, prove
from tandem.bench.stream import RequestFailed

from .fakes import THRESHOLD, Endpoint, serving


async def proof_of(endpoint: Endpoint, **options: Any) -> Proof:
    async with serving(endpoint):
        return await prove(endpoint.url, **{"sleep": no_sleep, **options})


async def no_sleep(seconds: float) -> None:
    """Time does not matter here."""


def failed(proof: Proof) -> list[str]:
    return [c.claim for c in proof.checks if not c.held]


async def test_every_claim_holds_for_an_endpoint_that_disaggregates() -> None:
    proof = await proof_of(Endpoint())
    assert proof.held
    assert failed(proof) == []
    assert len(proof.checks) == len({c.claim for c in proof.checks}) == 10


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        ("short prompts take the other path", "short: a decoder alone answered"),
        ("the router miscounts short prompts", "short: the router counted what the engine counted"),
        ("a prefiller works at short prompts", "short: no prefiller took part"),
        ("long prompts take the other path", "long: a prefiller and a decoder answered"),
        ("the router miscounts long prompts", "long: the router counted what the engine counted"),
        ("the prefiller finds a part in its cache", "long: the prefiller computed the prompt"),
        ("no KV crosses", "long: the KV cache crossed to the decoder"),
        ("the decoder computes a part", "long: the decoder computed none of the prompt"),
        ("the reference comes from a cache", "long: the reference was computed by the decoder alone"),
        ("the answer is another", "long: the answer is the decoder's own"),
        ("there is no answer", "long: the answer is the decoder's own"),
    ],
)
async def test_each_claim_fails_when_just_that_is_wrong(broken: str, claim: str) -> None:
    proof = await proof_of(Endpoint(broken))
    assert failed(proof) == [claim]
    assert not proof.held


async def test_every_claim_can_fail() -> None:
    """The list above leaves none out."""
    tried = {
        mark.args[1][i][1]
        for mark in test_each_claim_fails_when_just_that_is_wrong.pytestmark  # type: ignore[attr-defined]
        for i in range(len(mark.args[1]))
    }
    assert tried == {c.claim for c in (await proof_of(Endpoint())).checks}


async def test_the_readme_shows_every_claim() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for check in (await proof_of(Endpoint())).checks:
        assert f"ok   {check.claim} " in readme


async def test_what_was_seen_is_told_in_figures() -> None:
    endpoint = Endpoint()
    proof = await proof_of(endpoint)
    short, long = proof.shots
    tokens = len(endpoint.asked[1]["messages"][0]["content"].split())
    assert (short.name, short.path, short.kv_bytes) == ("short", "decode_only", None)
    assert (long.router_tokens, long.engine_tokens) == (tokens, tokens)
    assert (long.remote_tokens, long.cached_tokens, long.computed_tokens) == (tokens - 32, 32, 0)
    assert (long.kv_bytes, long.kv_ms, long.prefill_ms) == (1000 * tokens, 250.0, 12.5)
    assert long.answer == "It is Paris."
    assert 0 < long.itl_p50_ms <= long.itl_max_ms
    assert json.loads(json.dumps(proof.as_dict()))["held"] is True


async def test_counters_of_before_do_not_count() -> None:
    endpoint = Endpoint()
    for engine in (endpoint.prefill, endpoint.decode):
        engine.counters.update(computed=1234, cached=99, received=7, bytes=10**9, transfers=5)
    assert failed(await proof_of(endpoint)) == []


async def test_counters_that_are_written_late_are_waited_for() -> None:
    endpoint = Endpoint()
    late: list[Callable[[], None]] = []

    def from_now_on(step: str) -> None:
        if step.startswith("a long prompt"):
            endpoint.later = late

    async def write_one(seconds: float) -> None:
        late.pop(0)()

    assert failed(await proof_of(endpoint, on_step=from_now_on, sleep=write_one)) == []
    assert late == []


async def test_counters_that_never_come_are_not_waited_for_without_end() -> None:
    proof = await proof_of(Endpoint(later=[]))
    assert failed(proof) == [
        "long: the prefiller computed the prompt",
        "long: the KV cache crossed to the decoder",
        "long: the decoder computed none of the prompt",
        "long: the reference was computed by the decoder alone",
    ]


async def test_no_cache_can_answer_a_prompt() -> None:
    """Every prompt has the run's nonce, and the reference, which repeats one, has a salt."""
    endpoint = Endpoint()
    async with serving(endpoint):
        for _ in range(2):
            await prove(endpoint.url, sleep=no_sleep)
    short, long, *again = endpoint.asked
    assert len({json.dumps(body) for body in endpoint.asked}) == 4
    for first, second in zip((short, long), again, strict=True):
        common = len(_common_prefix(first, second).split())
        assert common < 16, "less than a block of tokens may be the same in two runs"
    references = endpoint.decode.asked
    assert [r["messages"] for r in references] == [long["messages"], again[1]["messages"]]
    assert len({r["cache_salt"] for r in references}) == 2
    assert "cache_salt" not in long


def _common_prefix(first: dict[str, Any], second: dict[str, Any]) -> str:
    a, b = (body["messages"][0]["content"] for body in (first, second))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return str(a[:same])


async def test_answers_are_greedy_and_of_one_length() -> None:
    endpoint = Endpoint()
    await proof_of(endpoint)
    for body in endpoint.asked + endpoint.decode.asked:
        assert (body["temperature"], body["stream"]) == (0, True)
        assert body["max_tokens"] == endpoint.asked[0]["max_tokens"] > 1


async def test_a_difference_at_a_tie_is_accepted_and_told() -> None:
    endpoint = Endpoint("the answer is another")
    original = endpoint.answer_alone

    def tie(engine: Any, tokens: int, responder: Any) -> None:
        endpoint.broken = "tie"
        original(engine, tokens, responder)

    endpoint.answer_alone = tie  # type: ignore[method-assign]
    proof = await proof_of(endpoint)
    assert failed(proof) == []
    assert "differ from token 2, where the two are 0.200 apart: a tie" in proof.checks[-1].seen


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (Endpoint(models=()), "/v1/models names no model; is the endpoint ready?"),
        (Endpoint(explains=False), "The router does not tell the path it took; start it with --explain"),
    ],
)
async def test_a_proof_that_cannot_be_carried_out_says_what_is_missing(endpoint: Endpoint, said: str) -> None:
    with pytest.raises((ProofError, RequestFailed)) as error:
        await proof_of(endpoint)
    assert said in str(error.value)


async def test_an_error_of_the_endpoint_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Endpoint, tokens: int, responder: Any) -> None:
        responder.send(503, [], b'{"error": {"message": "draining"}}')

    monkeypatch.setattr(Endpoint, "answer", refuse)
    with pytest.raises(RequestFailed, match=r"HTTP 503: .*draining"):
        await proof_of(Endpoint())


async def test_steps_are_told_before_they_are_taken() -> None:
    endpoint = Endpoint()
    seen: list[tuple[str, int]] = []
    await proof_of(endpoint, on_step=lambda step: seen.append((step, len(endpoint.asked))))
    assert [asked for _, asked in seen] == [0, 1]
    assert seen[0][0] == "a short prompt"


@pytest.mark.parametrize("tokens", [256, 1536, 10_000])
def test_a_long_prompt_is_long_enough_and_its_own(tokens: int) -> None:
    prompt = long_prompt("n1", tokens=tokens)
    assert tokens * 5 / 6 < len(prompt.split()) < tokens + THRESHOLD
    assert prompt == long_prompt("n1", tokens=tokens) != long_prompt("n2", tokens=tokens)
    assert prompt.endswith("?")
