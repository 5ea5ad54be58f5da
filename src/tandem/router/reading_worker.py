"""The reading process: reads request bodies from a pipe, writes what is to be known of them to another."""

from __future__ import annotations

import resource
import sys
from typing import IO

import msgspec

from tandem.router.errors import ApiError
from tandem.router.facts import facts
from tandem.router.helper_frames import Kind, receive, send, work

_MEMORY = 4 * 2**30
"""Bytes of address space: a body of nothing but brackets is decoded to thirty times its size."""


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Work until `requests` ends."""
    receive(requests)  # the configuration, of which nothing is needed
    send(answers, Kind.READY, b"")
    while True:
        _, data = receive(requests)
        try:
            send(answers, Kind.FACTS, msgspec.json.encode(facts(data)))
        except ApiError as error:
            send(answers, Kind.BAD_BODY, msgspec.json.encode([error.message, error.param]))
        except MemoryError:
            said = "The request body is too large to be read: it decodes to gigabytes."
            send(answers, Kind.BAD_BODY, msgspec.json.encode([said, None]))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
    work(serve, "reading process", int(sys.argv[1]))


if __name__ == "__main__":
    main()
