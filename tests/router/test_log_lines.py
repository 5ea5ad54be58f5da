"""What the router's log looks like, and when it is written."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.http import Responder
from tandem.prompt import NotExact
from tandem.router.log_lines import LogLines

from .conftest import SHORT, Start
from .fakes import JSON, SSE, FakeEngine, Seen, local_counter


class Stream(io.StringIO):
    """Notes what each write brought."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def log(stream: Stream) -> Iterator[logging.Logger]:
    logger = logging.Logger("a router's")
    handler = LogLines(stream)
    logger.addHandler(handler)
    yield logger
    handler.close()


async def test_what_one_turn_of_the_loop_says_is_one_write(log: logging.Logger, stream: Stream) -> None:
    log.info("first %d", 1)
    log.info("second")
    assert stream.writes == []
    await asyncio.sleep(0)
    (written,) = stream.writes
    assert [line.split("] ")[1] for line in written.splitlines()] == ["first 1", "second"]
    log.info("third")
    await asyncio.sleep(0)
    assert len(stream.writes) == 2


async def test_a_warning_is_written_at_once_and_what_came_before_it(
    log: logging.Logger, stream: Stream
) -> None:
    log.info("before")
    log.warning("look")
    assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == ["before", "look"]
    await asyncio.sleep(0)
    assert len(stream.writes) == 1


def test_without_a_loop_each_line_is_written_at_once(log: logging.Logger, stream: Stream) -> None:
    log.info("starting")
    assert len(stream.writes) == 1


async def test_what_a_thread_says_comes_in_its_place(log: logging.Logger, stream: Stream) -> None:
    def say() -> None:
        thread = threading.Thread(target=log.info, args=("of a thread",))
        thread.start()
        thread.join()

    say()
    assert len(stream.writes) == 1, "no loop runs there, so it is written at once"
    stream.truncate(0)
    log.info("of the loop")
    say()
    await asyncio.sleep(0)
    assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == ["of the loop", "of a thread"]


async def test_closing_leaves_no_line_behind(stream: Stream) -> None:
    logger, handler = logging.Logger("another"), LogLines(stream)
    logger.addHandler(handler)
    logger.info("last words")
    handler.flush()
    assert "last words" in stream.getvalue()
    handler.close()


@pytest.mark.parametrize(
    ("said", "values"),
    [("said so", ()), ("said %s", ("so",)), ("said %(what)s", ({"what": "so"},)), ("{} %s", ({},))],
)
@pytest.mark.parametrize("created", [1795978425.117, 1795978425.9994, 1795978426.0, 1795978425.5])
def test_lines_are_as_they_always_were(
    stream: Stream, said: str, values: tuple[object, ...], created: float
) -> None:
    standard = logging.Formatter("%(asctime)s [%(levelname)s] %(message)s")
    record = logging.LogRecord("x", logging.INFO, "f", 1, said, values, None)
    record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
    line = LogLines(stream).format(record)
    assert line == standard.format(record)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[INFO\] ", line)


def test_a_traceback_comes_with_its_line(stream: Stream) -> None:
    try:
        raise RuntimeError("the cause")
    except RuntimeError:
        record = logging.LogRecord("x", logging.INFO, "f", 1, "said %s", ("so",), sys.exc_info())
    first, *rest = LogLines(stream).format(record).splitlines()
    assert first.endswith("[INFO] said so")
    assert rest[-1] == "  RuntimeError: the cause"


async def test_one_that_cannot_be_formatted_harms_no_other(
    log: logging.Logger, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    log.info("%d", "no number")
    log.info("whole")
    await asyncio.sleep(0)
    assert "whole" in stream.getvalue()
    assert "--- Logging error ---" in capsys.readouterr().err


# Nobody but the router writes lines

FORGED = "2026-01-01 00:00:00,000 [INFO] forged"
EVIL = f"x\n{FORGED}\r{FORGED}\x0b\x1b[2J\x85{FORGED}\u2028{FORGED}\u202e"
GENUINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[(DEBUG|INFO|WARNING|ERROR)\] .*|  .*")


def genuine(text: str) -> bool:
    """Whether all of a log's lines are the router's, and are shown as they are."""
    lines = text.split("\n")[:-1]
    return all(
        GENUINE.fullmatch(line) and line.isprintable() and len(line) < 5000 and not line.startswith(FORGED)
        for line in lines
    )


@pytest.fixture
def everything() -> Iterator[Stream]:
    """All that is logged meanwhile, as a router writes it."""
    stream, ours = Stream(), logging.getLogger("tandem")
    handler, level = LogLines(stream), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield stream
    ours.removeHandler(handler)
    ours.setLevel(level)
    handler.close()


def test_a_line_break_or_what_moves_a_cursor_is_written_out(log: logging.Logger, stream: Stream) -> None:
    log.info("a model %s", "\n\r\x1b\x85\u2028 ö 模型")
    assert stream.getvalue().endswith("] a model \\n\\r\\x1b\\x85\\u2028 ö 模型\n")


def test_a_long_line_and_a_long_traceback_are_cut(log: logging.Logger, stream: Stream) -> None:
    log.info("%s", "x" * 5_000_000)
    try:
        raise LookupError("\n".join(["y" * 5000] * 5000))
    except LookupError:
        log.exception("failed")
    assert genuine(stream.getvalue())
    assert "(5000000 characters)" in stream.getvalue()
    assert "LookupError" in stream.getvalue()
    assert stream.getvalue().count("\n") < 210


SAYS_SO: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/v1/completions", {**SHORT, "model": EVIL}, {}),
    ("/v1/completions", {**SHORT, EVIL: 1}, {}),
    ("/v1/completions", {**SHORT, EVIL * 10_000: 1}, {}),
    ("/v1/completions", {**SHORT, "chat_template": EVIL}, {}),
    ("/v1/completions", {**SHORT, "kv_transfer_params": EVIL}, {}),
    ("/v1/completions", {**SHORT, "user": EVIL}, {}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": EVIL, "content": EVIL}]}, {}),
    ("/v1/chat/completions", {"model": "m", "messages": EVIL, "tools": EVIL}, {}),
    ("/invocations", {EVIL: EVIL}, {}),
    ("/invocations", SHORT, {"x-amzn-sagemaker-adapter-identifier": EVIL}),
    ("/v1/completions", SHORT, {"x-request-id": EVIL}),
    ("/v1/completions", SHORT, {"x-session-id": EVIL}),
    ("/v1/completions", SHORT, {"authorization": EVIL}),
    ("/v1/completions", SHORT, {"content-type": EVIL}),
    ("/v1/completions", SHORT, {"x-data-parallel-rank": EVIL}),
    ("/v1/completions", SHORT, {"origin": EVIL}),
    ("/v1/completions%0A" + FORGED.replace(" ", "%20"), SHORT, {}),
    ("/v1/completions?" + FORGED.replace(" ", "%20"), SHORT, {}),
]


@pytest.mark.parametrize(
    "local", [None, local_counter(fails=NotExact("x", EVIL))], ids=["engines count", "here"]
)
async def test_nothing_that_a_client_sends_can_forge_a_line(
    start: Start, everything: Stream, local: Any
) -> None:
    endpoint = await start(local=local, routing_strategy="session", session_field="user", explain=True)
    for path, body, headers in SAYS_SO:
        # Of a header's value only what HTTP lets through: no line ends, but what other eyes take for some.
        sent = {
            name.encode(): re.sub(r"[\0-\x1f]", " ", value).encode("latin-1", "replace")
            for name, value in headers.items()
        }
        answer = await endpoint.client.post(
            path, content=json.dumps(body), headers={b"content-type": b"application/json", **sent}
        )
        assert answer.status_code in (200, 400, 404), answer.text
    assert "forged" in everything.getvalue(), "some of it is told"
    assert genuine(everything.getvalue())


async def test_nothing_that_an_engine_says_can_forge_a_line_or_tells_the_prompt(
    start: Start, everything: Stream
) -> None:
    endpoint = await start(routing_threshold=0)
    error = {"message": f"the prompt was {EVIL}", "type": EVIL, "code": 400}

    def in_a_stream(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        responder.finish()
        return True

    def with_status(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.send(500, JSON, json.dumps({"error": error}).encode())
        return True

    for answers in (in_a_stream, with_status):
        for engine in (*endpoint.prefill, *endpoint.decode):
            engine.on_generate = answers
        for stream in (True, False):
            await endpoint.post({**SHORT, "stream": stream})
    text = everything.getvalue()
    told = r"decode leg failed: http://\S+ began its stream with an error \(code 400, \d+ characters\)"
    assert re.search(told, text)
    assert "forged" not in text
    assert "the prompt was" not in text
    assert genuine(text)


async def test_a_request_that_fails_is_logged_by_its_path_as_sent(
    start: Start, everything: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = await start()

    def fails(*args: object, **named: object) -> None:
        raise LookupError(EVIL)

    monkeypatch.setattr(endpoint.app, "_refuse", fails)
    long = "/%0A" + FORGED.replace(" ", "%20") + "x" * 10_000
    with_secret = "/secret%20place?key=secret"
    for path in (long, with_secret):
        assert (await endpoint.client.get(path)).status_code == 500
    assert genuine(everything.getvalue())
    assert f"GET {long[:200]} failed\n" in everything.getvalue()
    assert "key=" not in everything.getvalue()
    assert "LookupError: x" in everything.getvalue()
