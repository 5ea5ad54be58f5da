"""Several models behind one router: each request reaches the engines that serve its model, and no others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tandem.http import Request, Responder
from tandem.prompt import PromptCounter, Tokens
from tandem.router.engines import State

from .conftest import CHAT, LONG, SHORT, Endpoint, Start
from .fakes import JSON, FakeEngine, eventually, local_counter, reads_kv

TWO = {"p0": ["a"], "p1": ["b"], "d0": ["a"], "d1": ["b"]}


async def two_models(start: Start, **options: Any) -> Endpoint:
    """A pair for each of the models a and b."""
    return await start(prefill=2, decode=2, serves=TWO, **options)


def asked(endpoint: Endpoint) -> dict[str, set[str]]:
    """The models that clients' requests reached each engine with, and what it was asked to count."""
    fakes = (*endpoint.prefill, *endpoint.decode, *endpoint.roleless)
    return {
        fake.name: {s.body.get("model", "") for s in fake.requests} | {t["model"] for t in fake.tokenized}
        for fake in fakes
        if fake.requests or fake.tokenized
    }


@pytest.mark.parametrize("body", [SHORT, LONG, {**LONG, "n": 2}], ids=["short", "long", "not to be split"])
async def test_a_request_reaches_only_engines_of_its_model(start: Start, body: dict[str, Any]) -> None:
    endpoint = await two_models(start)
    for model in ("a", "b", "b", "a"):
        assert (await endpoint.post({**body, "model": model})).status_code == 200
    met = asked(endpoint)
    long = body == LONG
    assert met == {"d0": {"a"}, "d1": {"b"}} | ({"p0": {"a"}, "p1": {"b"}} if long else {})
    if long:
        assert all(s.kv for d in endpoint.decode for s in d.requests)


async def test_a_chat_is_counted_by_an_engine_of_its_model(start: Start) -> None:
    endpoint = await two_models(start)
    for decoder in endpoint.decode:
        decoder.tokens = lambda body: 5 if body["model"] == "a" else 500
    for model, prefills in (("a", 0), ("b", 1)):
        await endpoint.post({**CHAT, "model": model}, "/v1/chat/completions")
        assert len(endpoint.prefill[0].requests) + len(endpoint.prefill[1].requests) == prefills
    assert asked(endpoint) == {"d0": {"a"}, "d1": {"b"}, "p1": {"b"}}


async def test_with_several_models_a_request_has_to_name_its_own(start: Start) -> None:
    endpoint = await two_models(start)
    answer = await endpoint.post({"prompt": "hi"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (
        "The field 'model' is missing; several are served: a, b.",
        "model",
    )
    assert asked(endpoint) == {}


async def test_a_model_that_nobody_serves_is_none(start: Start) -> None:
    endpoint = await two_models(start)
    answer = await endpoint.post({**SHORT, "model": "c"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"] == "The model 'c' does not exist here. Served: a, b."
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert asked(endpoint) == {}


async def test_what_requests_may_name_can_be_fewer_than_what_engines_serve(start: Start) -> None:
    endpoint = await two_models(start, served_model_name=("b",))
    assert (await endpoint.post({**SHORT, "model": "a"})).status_code == 404
    answer = await endpoint.post({"prompt": "hi"})
    assert answer.json()["error"]["message"] == "The field 'model' is missing; several are served: b."
    assert (await endpoint.post({**SHORT, "model": "b"})).status_code == 200
    assert asked(endpoint) == {"d1": {"b"}}
    models = (await endpoint.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == ["b"]


@pytest.mark.parametrize("served", [(), ("a", "b")])
async def test_a_model_that_nobody_has_told_may_be_one_of_an_engine_to_come(
    start: Start, served: tuple[str, ...]
) -> None:
    """Until all have told theirs. What may not be asked for is none at once."""
    late = Late("d1")

    def before(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[1] = late

    endpoint = await two_models(start, before=before, wait=False, served_model_name=served)
    await endpoint.look_at(endpoint.decode[0], lambda engine: engine.state is State.READY)

    async def answers(model: str) -> int:
        return (await endpoint.post({**SHORT, "model": model})).status_code

    for body in (SHORT, LONG):
        answer = await endpoint.post({**body, "model": "b"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        said = answer.json()["error"]["message"]
        assert said == "The model 'b' may be one of an engine that is not up yet. Try again."
    assert await answers("c") == (404 if served else 503)
    assert asked(endpoint) == {}, "nobody else is asked"
    assert await answers("a") == 200
    late.up = True
    await endpoint.ready()
    assert [await answers(model) for model in "abc"] == [200, 200, 404]


@pytest.mark.parametrize("served", [(), ("m",)])
async def test_before_any_engine_is_up_the_endpoint_is_not_ready(
    start: Start, served: tuple[str, ...]
) -> None:
    def before(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[0] = Late("d0")

    endpoint = await start(prefill=0, before=before, wait=False, served_model_name=served)
    answer = await endpoint.post(SHORT)
    assert answer.status_code == 503
    said = answer.json()["error"]["message"]
    assert said == "The endpoint is not ready to serve this request. Try again."


async def test_the_log_names_the_engines_of_a_model_that_cannot_be_served_and_their_trouble(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await two_models(start)
    gone, other = endpoint.decode
    assert gone.server is not None
    await gone.server.close()
    await endpoint.look_at(gone, lambda engine: engine.state is State.WAITING)
    assert (await endpoint.post({**SHORT, "model": "a"}, x_request_id="mine")).status_code == 503
    (line,) = [r.getMessage() for r in caplog.records if "cannot be served" in r.getMessage()]
    assert line.startswith(f"mine cannot be served: {gone.url}: cannot connect")
    assert not any(fake.url in line for fake in (other, *endpoint.prefill))


@pytest.mark.parametrize("served", [(), ("a", "b")])
async def test_a_model_whose_engine_is_away_is_not_ready_and_nobody_else_answers_for_it(
    start: Start, served: tuple[str, ...]
) -> None:
    """It is not gone for good, so a client shall try again: 503, not 404."""
    endpoint = await two_models(start, served_model_name=served)
    gone, other = endpoint.decode
    assert gone.server is not None
    await gone.server.close()
    await endpoint.look_at(gone, lambda engine: engine.state is State.WAITING)
    for body in (SHORT, LONG):
        answer = await endpoint.post({**body, "model": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (await endpoint.post({"prompt": "hi"})).status_code == 400, "there are still two models"
    assert (await endpoint.post({**SHORT, "model": "b"})).status_code == 200
    assert asked(endpoint) == {other.name: {"b"}}
    models = (await endpoint.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == ["b"], "what can be had now"


async def test_a_failed_request_is_not_tried_again_on_engines_of_another_model(start: Start) -> None:
    endpoint = await two_models(start)
    endpoint.decode[0].refuses = lambda seen: True
    for body in (SHORT, LONG):
        assert (await endpoint.post({**body, "model": "a"})).status_code >= 500
    assert {name for name in asked(endpoint) if name in ("p1", "d1")} == set()


@pytest.mark.parametrize("by", ["models", "labels", "pair_labels"])
async def test_engines_that_do_not_belong_together_get_neither_canary_nor_request(
    start: Start, by: str
) -> None:
    names = {"models": "", "labels": "revision", "pair_labels": "zone"}[by]
    labels = {e: f"{names}={'x' if e[1] == '0' else 'y'}" for e in TWO} if names else None
    endpoint = await start(
        prefill=2,
        decode=2,
        serves=TWO if by == "models" else {name: ["a"] for name in TWO},
        labels=labels,
        pair_labels=("zone",) if by == "pair_labels" else (),
    )
    for _ in range(4):
        for model in ("a", "b") if by == "models" else ("a", "a"):
            assert (await endpoint.post({**LONG, "model": model})).status_code == 200
    for i, decoder in enumerate(endpoint.decode):
        readers = {s.kv["remote_engine_id"] for s in decoder.seen if s.kv}
        assert readers == {f"p{i}"}, "canaries among them"
        assert any(s.kv for s in decoder.requests)


async def test_labels_that_do_not_matter_part_nobody(start: Start) -> None:
    endpoint = await start(prefill=1, decode=2, labels={"p0": "zone=x", "d0": "zone=y"})
    for _ in range(2):
        await endpoint.post(LONG)
    assert [len([s for s in d.requests if s.kv]) for d in endpoint.decode] == [1, 1]


@pytest.mark.parametrize("names", [{}, {"served_model_name": ("a", "x")}, {"served_model_name": ("x", "y")}])
async def test_an_engine_that_serves_no_allowed_name_is_told(
    start: Start, caplog: pytest.LogCaptureFixture, names: dict[str, Any]
) -> None:
    endpoint = await start(prefill=0, serves={"d0": ["a", "b"]}, **names)
    told = [r.getMessage() for r in caplog.records if "--served-model-name" in r.getMessage()]
    wrong = names.get("served_model_name") == ("x", "y")
    url = endpoint.decode[0].url
    line = (
        f"{url} serves a, b, and --served-model-name allows x, y only: it gets no request that it can answer"
    )
    assert told == ([line] if wrong else [])


async def test_the_log_names_the_reason_where_nobody_could_hand_over(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    endpoint = await start(prefill=0, decode=0, roleless=1)
    assert (await endpoint.post(LONG)).status_code == 200
    told = [r.getMessage() for r in caplog.records if "Conditional routing" in r.getMessage()]
    assert told == [
        "Conditional routing: estimated_tokens=not counted, reason=no_prefillers_configured, "
        "disaggregate=False"
    ]


async def test_a_prefiller_with_no_decoder_to_go_with_says_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    endpoint = await start(prefill=2, decode=1, serves={"p0": ["a"], "p1": ["b"], "d0": ["a"]})
    lonely = endpoint.of(endpoint.prefill[1])
    await endpoint.look_at(endpoint.prefill[1], lambda engine: "agrees" in engine.why)
    assert lonely.why == "answers, and no decode engine in use agrees with it in labels and models"
    told = [r.getMessage() for r in caplog.records if "no decode engine in use" in r.getMessage()]
    assert told == [f"prefill {lonely.url} is not ready: {lonely.why}"]
    assert endpoint.prefill[1].seen == []
    assert (await endpoint.client.get("/ready")).status_code == 200, "the other pair serves"


async def test_a_canary_names_a_model_that_both_of_a_pair_serve(start: Start) -> None:
    """An alias that only one of them has is refused by the other."""
    served = {"p0": ["m"], "d0": ["alias", "m"]}

    def strict(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        for fake in (*prefill, *decode):
            known = served[fake.name]
            fake.refuses = lambda seen, known=known: seen.body["model"] not in known  # type: ignore[misc]

    endpoint = await start(serves=served, before=strict)
    assert (await endpoint.post({**LONG, "model": "m"})).status_code == 200
    assert len(endpoint.prefill[0].requests) == 1


async def test_a_decoder_without_a_prefiller_of_its_model_computes_long_prompts_freely(start: Start) -> None:
    """It has none to wait for, so nothing is a fallback, and no cap applies."""
    endpoint = await start(
        prefill=1, decode=2, serves={"p0": ["a"], "d0": ["a"], "d1": ["b"]}, explain=True, max_fallbacks=0
    )
    answer = await endpoint.post({**LONG, "model": "b"}, x_tandem_explain="1")
    assert answer.status_code == 200
    assert answer.headers["x-tandem-reason"] == "no_prefillers_configured"
    assert endpoint.prefill[0].requests == []


async def test_each_model_has_its_own_longest_prompt(start: Start) -> None:
    def small(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[1].max_model_len = 30

    endpoint = await two_models(start, before=small, explain=True)
    reasons = {}
    for model in ("a", "b"):
        answer = await endpoint.post({**LONG, "model": model}, x_tandem_explain="1")
        reasons[model] = answer.headers["x-tandem-reason"]
    assert reasons == {"a": "threshold", "b": "over_context"}
    models = (await endpoint.client.get("/v1/models")).json()["data"]
    assert {card["id"]: card["max_model_len"] for card in models} == {"a": 100_000, "b": 30}


async def test_all_models_are_listed_each_once(start: Start) -> None:
    endpoint = await start(
        prefill=1,
        decode=2,
        serves={"p0": ["a", "only-prefill"], "d0": ["a", "tuned:a"], "d1": ["a", "b"]},
    )
    answer = (await endpoint.client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert sorted(card["id"] for card in answer["data"]) == ["a", "b", "tuned"]
    assert [card["parent"] for card in answer["data"] if "parent" in card] == ["a"]


# LoRA adapters


ADAPTER = {"p0": ["m"], "p1": ["m", "tuned:m"], "d0": ["m", "tuned:m"], "d1": ["m"]}


async def test_an_adapters_requests_reach_only_engines_that_have_it(start: Start) -> None:
    endpoint = await start(prefill=2, decode=2, serves=ADAPTER)
    for _ in range(3):
        for body in (SHORT, LONG):
            assert (await endpoint.post({**body, "model": "tuned"})).status_code == 200
    assert asked(endpoint) == {"d0": {"tuned"}, "p1": {"tuned"}}
    for _ in range(4):
        await endpoint.post(LONG)
    assert [len([s for s in p.requests if s.body["model"] == "m"]) for p in endpoint.prefill] == [2, 2]


async def test_a_request_without_a_model_gets_the_base_model_of_engines_with_adapters(start: Start) -> None:
    endpoint = await start(prefill=2, decode=2, serves=ADAPTER)
    for _ in range(2):
        assert (await endpoint.post({"prompt": LONG["prompt"]})).status_code == 200
    assert all("model" not in s.body for d in endpoint.decode for s in d.requests)
    assert [len(d.requests) for d in endpoint.decode] == [1, 1]


async def test_adapters_are_served_from_when_they_are_loaded_until_they_are_gone(start: Start) -> None:
    """By engines that stay in use all the time."""
    endpoint = await start(serves={"p0": ["m"], "d0": ["m"]})
    fakes = (*endpoint.prefill, *endpoint.decode)
    base = [{"id": "m", "object": "model", "max_model_len": 100_000}]
    adapter = {"id": "tuned", "object": "model", "max_model_len": 100_000, "parent": "m"}
    assert (await endpoint.post({**SHORT, "model": "tuned"})).status_code == 404
    for fake in fakes:
        fake.cards = [*base, adapter]
        await endpoint.look_at(fake, lambda engine: "tuned" in engine.model_ids)
    for body in (SHORT, LONG):
        assert (await endpoint.post({**body, "model": "tuned"})).status_code == 200
    assert asked(endpoint) == {"p0": {"tuned"}, "d0": {"tuned"}}
    assert reads_kv(endpoint.decode[0].requests[-1])
    for fake in fakes:
        fake.cards = base
        await endpoint.look_at(fake, lambda engine: "tuned" not in engine.model_ids)
    answer = await endpoint.post({**SHORT, "model": "tuned"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await endpoint.post(LONG)).status_code == 200
    assert all(endpoint.of(fake).losses == 0 for fake in fakes)


# Counting


class Letters:
    """Counts a token for each letter, whatever the model is, and notes for whom."""

    def __init__(self) -> None:
        self.models: list[str | None] = []

    def completion(self, body: Mapping[str, Any]) -> Tokens:
        self.models.append(body.get("model"))
        return Tokens([7] * len(body["prompt"]))

    def chat(self, body: Mapping[str, Any], most: int = 0) -> Tokens:
        self.models.append(body.get("model"))
        return Tokens([7] * len(str(body["messages"])))

    def counted(self) -> set[str | None]:
        """Whose prompts were counted since the last call."""
        models, self.models = self.models, []
        return set(models)


@dataclass
class Late(FakeEngine):
    """Says that it is not well until it is up."""

    up: bool = False

    async def _answer(self, request: Request, responder: Responder) -> None:
        if self.up:
            await super()._answer(request, responder)
        else:
            responder.send(503, JSON, b"{}")


def counter_of(letters: Letters) -> PromptCounter:
    return cast(PromptCounter, letters)


def b_counts_otherwise(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
    decode[1].tokens = lambda body: 3 * len(str(body.get("prompt", body.get("messages"))))


async def counts(endpoint: Endpoint, model: str) -> int:
    answer = await endpoint.post({**LONG, "model": model}, x_tandem_explain="1")
    return int(answer.headers["x-tandem-prompt-tokens"])


TOKENS = len(str(LONG["prompt"]))


async def test_models_that_the_tokenizer_is_not_for_are_counted_by_their_engines(start: Start) -> None:
    letters = Letters()
    endpoint = await two_models(
        start, local=counter_of(letters), before=b_counts_otherwise, counted_model=("a",), explain=True
    )
    assert letters.counted() == {"a"}, "only its engines were compared"
    for decoder in endpoint.decode:
        decoder.tokenized.clear()
    assert await counts(endpoint, "a") == TOKENS
    assert await counts(endpoint, "b") == 3 * TOKENS
    assert letters.counted() == {"a"}
    assert [len(d.tokenized) for d in endpoint.decode] == [0, 1]


@pytest.mark.parametrize("first", ["a", "b"])
async def test_a_model_that_turns_out_to_be_counted_otherwise_is_counted_by_its_engines(
    start: Start, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without --counted-model the tokenizer is tried for all. Whoever is compared first: what differs for one
    model says nothing about the other."""
    second = 1 if first == "a" else 0
    letters = Letters()
    late = Late(f"d{second}")

    def before(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[second] = late
        b_counts_otherwise(prefill, decode)

    endpoint = await two_models(start, local=counter_of(letters), before=before, explain=True, wait=False)
    one = endpoint.decode[1 - second]

    async def compared() -> bool:
        return endpoint.of(one).state is State.READY

    await eventually(compared)
    late.up = True
    await endpoint.ready()
    letters.counted()
    for decoder in endpoint.decode:
        decoder.tokenized.clear()
    assert await counts(endpoint, "a") == TOKENS
    assert await counts(endpoint, "b") == 3 * TOKENS
    assert letters.counted() == {"a"}
    assert [len(d.tokenized) for d in endpoint.decode] == [0, 1]
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert endpoint.decode[1].url in error
    assert "--counted-model" in error


async def test_an_adapter_is_not_counted_with_a_tokenizer_that_is_for_another_model(start: Start) -> None:
    """It may have tokens of its own."""
    letters = Letters()
    endpoint = await start(
        serves={"p0": ["m", "tuned:m"], "d0": ["m", "tuned:m"]},
        local=counter_of(letters),
        counted_model=("m",),
        explain=True,
    )
    for model in ("tuned", "m"):
        assert await counts(endpoint, model) == TOKENS
    assert letters.counted() == {"m"}


@pytest.mark.parametrize(("serves", "here"), [("m", True), ("other", False)])
async def test_a_prompt_for_no_named_model_is_counted_here_where_the_engines_have_only_this_one(
    start: Start, serves: str, here: bool
) -> None:
    letters = Letters()
    endpoint = await start(
        serves={"p0": [serves], "d0": [serves]}, local=counter_of(letters), counted_model=("m",)
    )
    letters.counted()
    endpoint.decode[0].tokenized.clear()
    await endpoint.post({"prompt": LONG["prompt"]})
    assert (letters.counted() == {None}) is here
    assert (len(endpoint.decode[0].tokenized) == 0) is here


async def test_a_tokenizer_that_no_model_agrees_with_is_used_for_none(start: Start) -> None:
    endpoint = await two_models(start, local=local_counter(off=1), explain=True)
    assert [await counts(endpoint, model) for model in ("a", "b")] == [TOKENS, TOKENS]
    assert [d.tokenized[-1]["model"] for d in endpoint.decode] == ["a", "b"]
