"""What the router's log looks like, and when it is written."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
import threading
from collections.abc import Iterator

import pytest

from tandem.router.log_lines import LineRecord, LogLines


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


@pytest.mark.parametrize("kind", [logging.LogRecord, LineRecord])
@pytest.mark.parametrize(
    ("said", "values"),
    [("said so", ()), ("said %s", ("so",)), ("said %(what)s", ({"what": "so"},)), ("{} %s", ({},))],
)
@pytest.mark.parametrize("created", [1795978425.117, 1795978425.9994, 1795978426.0, 1795978425.5])
def test_lines_are_as_they_always_were(
    stream: Stream, kind: type[logging.LogRecord], said: str, values: tuple[object, ...], created: float
) -> None:
    standard = logging.Formatter("%(asctime)s [%(levelname)s] %(message)s")
    try:
        raise RuntimeError("the cause")
    except RuntimeError:
        for cause in (None, sys.exc_info()):
            record = kind("x", logging.INFO, "f", 1, said, values, cause)
            record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
            line = LogLines(stream).format(record)
            assert line == standard.format(record)
            assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[INFO\] ", line)


async def test_one_that_cannot_be_formatted_harms_no_other(
    log: logging.Logger, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    log.info("%d", "no number")
    log.info("whole")
    await asyncio.sleep(0)
    assert "whole" in stream.getvalue()
    assert "--- Logging error ---" in capsys.readouterr().err
