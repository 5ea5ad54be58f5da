"""The counting process: reads request bodies from a pipe, writes their token ids to another, one at a time.

It has a process of its own because tokenizing holds the interpreter's lock: a thread would stall the router's
loop all the same. It ends when its pipe does, so also when the router was killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from array import array
from typing import IO

import msgspec

from tandem.config import RouterConfig
from tandem.prompt import BadPrompt, LoadError, NotExact, PromptCounter
from tandem.router.body import Body
from tandem.router.counting_frames import HEADER, Kind, header
from tandem.router.errors import ApiError
from tandem.router.local_counter import load_counter

_NICE = 10
"""Where cores are few, streams go first; unless the command says otherwise."""


def answer(counter: PromptCounter, kind: Kind, data: bytes) -> tuple[Kind, bytes]:
    """The frame that answers one request body."""
    try:
        body = Body.parse(data).decoded()
        tokens = counter.chat(body) if kind is Kind.CHAT else counter.completion(body)
        return Kind.IDS, array("I", tokens.ids).tobytes()
    except NotExact as reason:
        return Kind.NOT_EXACT, msgspec.json.encode([reason.reason, reason.detail])
    except BadPrompt as error:
        return Kind.BAD_PROMPT, msgspec.json.encode([error.message, error.param])
    except ApiError as error:
        return Kind.BAD_BODY, msgspec.json.encode([error.message, error.param])


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Work until `requests` ends."""
    _, data = _read(requests)
    # The router says what is to be said of the files.
    logging.disable(logging.CRITICAL)
    try:
        counter = load_counter(msgspec.json.decode(data, type=RouterConfig))
    except (LoadError, OSError) as error:
        _write(answers, Kind.UNUSABLE, msgspec.json.encode(str(error)))
        return
    logging.disable(logging.NOTSET)
    if counter is None:
        raise ValueError("the configuration names no tokenizer")
    _write(answers, Kind.READY, msgspec.json.encode([counter.inexact_text, counter.inexact_chat]))
    while True:
        kind, data = _read(requests)
        _write(answers, *answer(counter, kind, data))


def _read(pipe: IO[bytes]) -> tuple[Kind, bytes]:
    """Raises EOFError at the end."""
    head = pipe.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError
    kind, length = HEADER.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return Kind(kind), data


def _write(pipe: IO[bytes], kind: Kind, data: bytes) -> None:
    pipe.write(header(kind, data))
    pipe.write(data)
    pipe.flush()


def main() -> None:
    # Signals to the router's group are the router's to act on: it may drain for a while, and still counts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(int(sys.argv[1]) if len(sys.argv) > 1 else _NICE)
    # What a library prints must not get among the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(
        stream=sys.stderr, level="WARNING", format="%(asctime)s [%(levelname)s] counting process: %(message)s"
    )
    try:
        serve(sys.stdin.buffer, answers)
    except (EOFError, BrokenPipeError):
        # The router is gone, or done. No cleaning up, which could write to a pipe that nobody reads.
        os._exit(0)


if __name__ == "__main__":
    main()
