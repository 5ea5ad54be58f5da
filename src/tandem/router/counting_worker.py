"""The counting process: reads request bodies from a pipe, writes their token ids to another, one at a time.

It has a process of its own because tokenizing holds the interpreter's lock: a thread would stall the router's
loop all the same. It ends when its pipe does, so also when the router was killed.
"""

from __future__ import annotations

import logging
import sys
from array import array
from functools import partial
from typing import IO

import msgspec

from tandem.config import RouterConfig
from tandem.prompt import MOST_TEXT, BadPrompt, LoadError, NotExact, PromptCounter, TooLong
from tandem.router.body import Body
from tandem.router.errors import ApiError
from tandem.router.helper_frames import Kind, receive, send, work
from tandem.router.local_counter import load_counter

LONG = 2 * 2**20
"""Characters of a chat's text from which on it is for a process where others like it wait."""
_NICE = 10
"""Where cores are few, streams go first; unless the command says otherwise."""


def answer(counter: PromptCounter, kind: Kind, data: bytes, long: int = LONG) -> tuple[Kind, bytes]:
    """The frame that answers one request body."""
    try:
        body = Body.parse(data).decoded()
        if kind is Kind.COMPLETION:
            tokens = counter.completion(body)
        else:
            tokens = counter.chat(body, long if kind is Kind.CHAT else MOST_TEXT)
        return Kind.IDS, array("I", tokens.ids).tobytes()
    except NotExact as reason:
        return Kind.NOT_EXACT, msgspec.json.encode([reason.reason, reason.detail])
    except BadPrompt as error:
        return Kind.BAD_PROMPT, msgspec.json.encode([error.message, error.param])
    except TooLong:
        return Kind.TOO_LONG, b""
    except ApiError as error:
        return Kind.BAD_BODY, msgspec.json.encode([error.message, error.param])


def serve(requests: IO[bytes], answers: IO[bytes], long: int = LONG) -> None:
    """Work until `requests` ends. `long`: see `LONG`."""
    _, data = receive(requests)
    # The router says what is to be said of the files.
    logging.disable(logging.CRITICAL)
    try:
        counter = load_counter(msgspec.json.decode(data, type=RouterConfig))
    except (LoadError, OSError) as error:
        send(answers, Kind.UNUSABLE, msgspec.json.encode(str(error)))
        return
    logging.disable(logging.NOTSET)
    if counter is None:
        raise ValueError("the configuration names no tokenizer")
    send(answers, Kind.READY, msgspec.json.encode([counter.inexact_text, counter.inexact_chat]))
    while True:
        kind, data = receive(requests)
        send(answers, *answer(counter, kind, data, long))


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]  # as many of the two as are not to be the usual ones
    nice = given[0] if given else _NICE
    long = given[1] if len(given) > 1 else LONG
    work(partial(serve, long=long), "counting process", nice)


if __name__ == "__main__":
    main()
