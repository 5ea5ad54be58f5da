"""Where prompts are counted: here while that agrees with the engines, else by an engine."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tandem.config import RouterConfig
from tandem.http import Client, Origin, Request, Responder
from tandem.prompt import BadPrompt, NotExact, PromptCounter
from tandem.router.body import Body
from tandem.router.classify import Api, why_decode_only
from tandem.router.counting import _SAMPLE, Counter
from tandem.router.counting_process import CountingProcess
from tandem.router.engines import Engine, EngineRole
from tandem.router.errors import ApiError
from tandem.router.fleet import Fleet
from tandem.router.helper_process import Unavailable
from tandem.router.legs import Legs
from tandem.router.strategies import Prompt

from .fakes import JSON, FakeEngine, engines, local_counter


class Answers(FakeEngine):
    """A fake whose /tokenize may be made to answer anything."""

    tokenize: tuple[int, bytes] | None = None

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.path == "/tokenize" and self.tokenize is not None:
            responder.send(self.tokenize[0], JSON, self.tokenize[1])
        else:
            await super()._answer(request, responder)


class Box:
    """A decoder, and counters that may ask it."""

    def __init__(self, fake: Answers, client: Client) -> None:
        self.fake = fake
        self.fleet = Fleet()
        self.legs = Legs(client, RouterConfig(decode=(fake.url,)))
        self.decoder = Engine(fake.url, EngineRole.DECODE, Origin.parse(fake.url))
        self.fleet.add(self.decoder)
        self.fleet.prove(self.decoder, [{"id": "m"}])

    async def checked(self, local: PromptCounter | None) -> Counter:
        counter = Counter(local, self.legs, self.fleet)
        await counter.check(self.decoder, "m")
        return counter


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    fake, client = Answers("d"), Client()
    async with engines(fake):
        yield Box(fake, client)
        await client.aclose()


PROMPT = Body.parse(b'{"prompt": "abcde", "temperature": 0}')


async def test_counts_that_agree_with_the_engines_are_made_here(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    counter = await box.checked(local_counter())
    assert [sorted(t) for t in box.fake.tokenized] == [["model", "prompt"], ["messages", "model"]]
    assert await counter.count(Api.COMPLETIONS, PROMPT) == Prompt(5, [7] * 5)
    assert len(box.fake.tokenized) == 2, "one of each kind was compared, and nothing asked since"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_counts_that_differ_from_the_engines_are_made_by_it_and_an_error_says_so(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    counter = await box.checked(local_counter(off=1))
    assert await counter.count(Api.COMPLETIONS, PROMPT) == Prompt(5, 5 * [7])
    assert box.fake.tokenized[-1] == {"prompt": "abcde"}
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "token counts differ for /v1/completions" in error.getMessage()
    assert box.decoder.url in error.getMessage()
    assert "--tokenizer" in error.getMessage()


async def test_ids_that_differ_count_as_much(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    local = local_counter()
    here = local.completion({"prompt": _SAMPLE}).ids
    box.fake.tokenize = 200, json.dumps({"count": len(here), "tokens": [*here[:-1], 8]}).encode()
    counter = await box.checked(local)
    box.fake.tokenize = None
    assert await counter.count(Api.COMPLETIONS, PROMPT) == Prompt(5, 5 * [7])
    assert "token ids differ for /v1/completions" in caplog.text


async def test_what_cannot_be_counted_here_is_not_compared_and_is_counted_by_an_engine(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    counter = await box.checked(local_counter(fails=NotExact("model")))
    assert box.fake.tokenized == []
    assert "not compared" in caplog.text
    assert await counter.count(Api.COMPLETIONS, PROMPT) == Prompt(5, 5 * [7])
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_prompt_that_no_engine_would_take_is_refused_here(box: Box) -> None:
    counter = await box.checked(local_counter(fails=BadPrompt("no roles", "messages")))
    with pytest.raises(ApiError, match="no roles") as error:
        await counter.count(Api.CHAT, Body.parse(b'{"messages": []}'))
    assert (error.value.status, error.value.param) == (400, "messages")


@pytest.mark.parametrize("more", ["", ', "messages": "hi"', ', "messages": null', ', "messages": {}'])
async def test_a_chat_without_messages_is_told_of_messages_and_not_of_a_prompt(box: Box, more: str) -> None:
    counter = await box.checked(None)
    with pytest.raises(ApiError, match=r"^messages must be a list\.$") as error:
        await counter.count(Api.CHAT, Body.parse(f'{{"model": "m"{more}}}'.encode()))
    assert (error.value.status, error.value.param) == (400, "messages")
    assert box.fake.tokenized == []


async def test_token_ids_are_counted_without_asking_an_engine_which_would_refuse_them(box: Box) -> None:
    counter = await box.checked(None)
    body = {"model": "m", "prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 3}
    assert await counter.count(Api.COMPLETIONS, Body.parse(json.dumps(body).encode())) == Prompt(3)
    assert box.fake.tokenized == []


async def test_without_a_tokenizer_nothing_is_compared(box: Box) -> None:
    counter = await box.checked(None)
    assert box.fake.tokenized == []
    assert await counter.count(Api.COMPLETIONS, PROMPT) == Prompt(5, 5 * [7])


CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "add_generation_prompt": False,
    "temperature": 0,
    "max_tokens": 5,
}


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"documents": [{"text": "x"}]}, {"documents": [{"text": "x"}]}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}, {"reasoning_effort": "low", "a": 1}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
        ({"reasoning_effort": "low", "chat_template_kwargs": None}, {"reasoning_effort": "low"}),
        ({"documents": None}, None),
    ],
)
async def test_an_engine_is_asked_with_all_that_shapes_the_prompt(
    box: Box, fields: dict[str, Any], arguments: dict[str, Any] | None
) -> None:
    counter = await box.checked(None)
    await counter.count(Api.CHAT, Body.parse(json.dumps({**CHAT, **fields}).encode()))
    (asked,) = box.fake.tokenized
    assert asked.pop("chat_template_kwargs", None) == arguments
    assert asked == {n: CHAT[n] for n in ("model", "messages", "tools", "add_generation_prompt")}


@pytest.mark.parametrize(("kept", "count"), [(3, 3), (9, 5), (-1, 5), (0, 5), (None, 5), ("3", 5)])
async def test_a_prompt_that_the_engine_will_cut_counts_as_cut(box: Box, kept: Any, count: int) -> None:
    counter = await box.checked(None)
    body = Body.parse(json.dumps({"prompt": "abcde", "truncate_prompt_tokens": kept}).encode())
    assert (await counter.count(Api.COMPLETIONS, body)).tokens == count


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ((400, b'{"error": {"message": "no such role"}}'), 400, "no such role"),
        ((404, b"<html>"), 400, "HTTP 404"),
        ((500, b'{"error": {"message": "dead"}}'), 503, "could not be counted"),
        ((200, b"<html>"), 503, "could not be counted"),
        ((200, b'{"tokens": [1]}'), 503, "could not be counted"),
        ((200, b'{"count": null}'), 503, "could not be counted"),
    ],
)
async def test_an_engine_that_cannot_count_gives_an_error_that_says_whose_turn_it_is(
    box: Box, answer: tuple[int, bytes], status: int, said: str
) -> None:
    counter = await box.checked(None)
    box.fake.tokenize = answer
    with pytest.raises(ApiError, match=said) as error:
        await counter.count(Api.COMPLETIONS, PROMPT)
    assert error.value.status == status
    assert error.value.quotes == (status == 400), "the engine's words may quote the prompt"


@pytest.mark.parametrize("how", ["gone", "broken"])
async def test_another_decoder_counts_when_one_cannot(box: Box, how: str) -> None:
    other = Answers("other")
    async with engines(other):
        counter = await box.checked(None)
        decoder = Engine(other.url, EngineRole.DECODE, Origin.parse(other.url))
        box.fleet.add(decoder)
        box.fleet.prove(decoder, [])
        box.decoder.in_flight, decoder.in_flight = 0, 1  # the one that cannot is asked first
        if how == "gone":
            assert box.fake.server is not None
            await box.fake.server.close()
        else:
            box.fake.tokenize = 500, b"{}"
        assert await counter.count(Api.COMPLETIONS, PROMPT) == Prompt(5, 5 * [7])
        assert len(other.tokenized) == 1
        assert box.fleet.ready(EngineRole.DECODE) == sorted(
            [decoder] if how == "gone" else [decoder, box.decoder], key=lambda e: e.url
        )


async def test_without_a_decoder_nothing_can_be_counted(box: Box) -> None:
    counter = await box.checked(None)
    box.fleet.lost(box.decoder, "gone")
    with pytest.raises(ApiError, match="No engine is ready") as error:
        await counter.count(Api.COMPLETIONS, PROMPT)
    assert error.value.status == 503


class Process:
    """Stands for the counting process: notes what it is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[bytes] = []
        self.error = error
        self.closed = False

    async def count(self, api: Api, data: bytes) -> array[int]:
        self.asked.append(data)
        if self.error is not None:
            raise self.error
        return array("I", [1, 2, 3])

    async def aclose(self) -> None:
        self.closed = True


def counter_with(process: Process, box: Box, off: int = 0) -> Counter:
    return Counter(local_counter(off), box.legs, box.fleet, cast(CountingProcess, process), large=800)


def completion(prompt: Any) -> Body:
    return Body.parse(json.dumps({"model": "m", "prompt": prompt}).encode())


@pytest.mark.parametrize(
    ("prompt", "there"),
    [
        ("a" * 700, False),
        ("a" * 800, True),
        ([1] * 40, True),  # an object each: an eighth of the bytes weighs as much
        ([1] * 20, False),
        ([1] * 400, True),
    ],
)
async def test_large_bodies_and_lists_of_ids_are_counted_in_the_process(
    box: Box, prompt: Any, there: bool
) -> None:
    process = Process()
    counted = await counter_with(process, box).count(Api.COMPLETIONS, completion(prompt))
    assert process.asked == ([completion(prompt).data] if there else [])
    assert (counted.tokens == 3) == there
    assert box.fake.tokenized == []


async def test_what_the_process_cannot_count_now_is_counted_by_an_engine(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    counter = counter_with(Process(Unavailable("it died")), box)
    assert await counter.count(Api.COMPLETIONS, completion("a" * 900)) == Prompt(900, 900 * [7])
    await counter.count(Api.COMPLETIONS, completion("a" * 900))
    assert len(box.fake.tokenized) == 2
    assert caplog.text.count("it died") == 1
    assert (await counter.count(Api.COMPLETIONS, completion([1] * 900))).tokens == 900
    assert len(box.fake.tokenized) == 2, "/tokenize does not take ids"


@pytest.mark.parametrize(
    ("error", "status"), [(BadPrompt("no roles", "messages"), 400), (ApiError(400, "no JSON"), 400)]
)
async def test_what_the_process_refuses_is_refused(box: Box, error: Exception, status: int) -> None:
    with pytest.raises(ApiError) as raised:
        await counter_with(Process(error), box).count(Api.COMPLETIONS, completion("a" * 900))
    assert raised.value.status == status
    assert box.fake.tokenized == []


async def test_counts_that_differ_from_the_engines_end_the_process(box: Box) -> None:
    process = Process()
    counter = counter_with(process, box, off=1)
    await counter.check(box.decoder, "m")
    assert process.closed
    assert (await counter.count(Api.COMPLETIONS, completion("a" * 900))).tokens == 900
    assert process.asked == []


@pytest.mark.parametrize("prompt", ["[1, 2,\n3]", "[]", "[5]"])
async def test_ids_are_told_from_other_lists_without_decoding_them(prompt: str) -> None:
    body = Body.parse(b'{"prompt": %b, "model": "m"}' % prompt.encode())
    assert why_decode_only(Api.COMPLETIONS, body) is None
    assert "prompt" not in body._decoded


@pytest.mark.parametrize("prompt", ['["1", "2"]', "[[1, 2]]", "[1, null]", "[1.5]", '["a"]'])
async def test_other_lists_are_served_by_a_decoder_alone(prompt: str) -> None:
    body = Body.parse(b'{"prompt": %b}' % prompt.encode())
    assert why_decode_only(Api.COMPLETIONS, body) == "prompt_list"


async def test_an_engine_that_counts_otherwise_and_leaves_is_asked_no_more(box: Box) -> None:
    """Its models' prompts are counted here again: what is worked out follows the fleet, also for a request
    that names no model."""
    other = Answers("other")
    async with engines(other):
        local = local_counter()
        counter = await box.checked(local)
        odd = Engine(other.url, EngineRole.DECODE, Origin.parse(other.url))
        other.tokenize = 200, b'{"count": 1}'
        box.fleet.add(odd)
        box.fleet.prove(odd, [{"id": "n"}])
        await counter.check(odd, "n")
        other.tokenize = None
        asks = len(box.fake.tokenized) + len(other.tokenized)
        for model, asked in (("m", 0), ("n", 1), (None, 2)):
            body = {"prompt": "abc", **({"model": model} if model else {})}
            await counter.count(Api.COMPLETIONS, Body.parse(json.dumps(body).encode()))
            assert len(box.fake.tokenized) + len(other.tokenized) - asks == asked
        box.fleet.remove(odd)
        for body in ({"prompt": "abc"}, {"prompt": "abc", "model": "n"}):
            await counter.count(Api.COMPLETIONS, Body.parse(json.dumps(body).encode()))
        assert len(box.fake.tokenized) + len(other.tokenized) - asks == 2
        assert counter.differing == {}
