"""What a router and its helper processes (see `helper_process`) say to each other over a pipe.

A frame is one byte that says what it is, the length of the rest (4 bytes, little-endian), and the rest:

| to the process | rest |
|---|---|
| CONFIG | what the process is to know, for counting RouterConfig as JSON; the first frame |
| CHAT, COMPLETION | a request body as it came |
| LONG_CHAT | the same, where much text may be made of it |
| READ | the same, to be read only (see `reading`) |

| from the process | rest |
|---|---|
| READY | JSON [why no text, why no chat can be counted, each empty where it can], or nothing |
| UNUSABLE | JSON message: it cannot work, as without a tokenizer; the last frame |
| IDS | token ids, 4 bytes each in the machine's order |
| NOT_EXACT | JSON [reason, detail] |
| BAD_PROMPT, BAD_BODY | JSON [message, param or null] |
| TOO_LONG | nothing: what a CHAT's template makes of it is for LONG_CHAT |
| FACTS | JSON: `facts.Facts` |
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import IO

HEADER = struct.Struct("<BI")

# One request's body, or its ids. A frame beyond it is none of ours.
MAX_LENGTH = 2**31


class Kind(IntEnum):
    CONFIG = 1
    CHAT = 2
    COMPLETION = 3
    LONG_CHAT = 4
    READ = 5
    READY = 16
    IDS = 17
    NOT_EXACT = 18
    BAD_PROMPT = 19
    BAD_BODY = 20
    UNUSABLE = 21
    TOO_LONG = 22
    FACTS = 23


def header(kind: Kind, rest: bytes) -> bytes:
    return HEADER.pack(kind, len(rest))


def receive(pipe: IO[bytes]) -> tuple[Kind, bytes]:
    """The process's side. Raises EOFError at the end."""
    head = pipe.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError
    kind, length = HEADER.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return Kind(kind), data


def send(pipe: IO[bytes], kind: Kind, data: bytes) -> None:
    """The process's side."""
    pipe.write(header(kind, data))
    pipe.write(data)
    pipe.flush()


def work(serve: Callable[[IO[bytes], IO[bytes]], None], name: str, nice: int) -> None:
    """Be a process that answers frames until its pipe ends; `name` is in what it logs."""
    # Signals to the router's group are the router's to act on: it may drain for a while, and still counts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(nice)
    # What a library prints must not get among the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(
        stream=sys.stderr, level="WARNING", format=f"%(asctime)s [%(levelname)s] {name}: %(message)s"
    )
    try:
        serve(sys.stdin.buffer, answers)
    except (EOFError, BrokenPipeError):
        # The router is gone, or done. No cleaning up, which could write to a pipe that nobody reads.
        os._exit(0)
