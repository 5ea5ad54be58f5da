"""Request bodies are read: small ones here, large ones in a process of their own, for which no stream waits,
and huge ones in another (see `helper_process`).

To split and look through 64 KiB takes 6 ms at most (of nothing but brackets; of text it takes 0.1); 10 MB of
the same take a second. Each process starts with its first body.
"""

from __future__ import annotations

import logging
from types import TracebackType

import msgspec

from tandem.router.body import Body
from tandem.router.errors import ApiError, unavailable
from tandem.router.facts import Facts
from tandem.router.helper_frames import Kind
from tandem.router.helper_process import HelperProcess, Limits, Unavailable, command

logger = logging.getLogger("tandem.router")

LARGE = 64 * 1024
"""Bytes of a body that is read elsewhere."""
HELP = 2**20
"""Bytes of a body that is read here all the same while there is no process."""

_NICE = "5"
"""More urgent than counting, as every large request waits for it; less than the router, as all streams do."""

_COMMAND = command("tandem.router.reading_worker", _NICE)
_FACTS = msgspec.json.Decoder(Facts)


class Reading:
    """A context manager: large bodies are read as long as the block."""

    def __init__(self, process: HelperProcess | None = None, *, patience: float = 10.0) -> None:
        """`patience`: seconds that a request waits for its body to be read."""
        self._process = process or HelperProcess(
            b"{}",
            command=_COMMAND,
            limits=Limits(patience=patience, waiting=64),
            name="the reading process",
            meanwhile="bodies of more than 1 MiB get a 503",
            waits=True,
        )

    async def __aenter__(self) -> Reading:
        self._process.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._process.aclose()

    async def read(self, data: bytes) -> Body:
        """A request's body. Raises ApiError 400 for one that may not be served, 503 where it cannot be read
        now."""
        if len(data) < LARGE:
            return Body.parse(data)
        try:
            kind, rest = await self._process.ask(Kind.READ, data)
        except Unavailable as reason:
            if len(data) > HELP:
                logger.warning("a body of %d bytes cannot be read: %s", len(data), reason)
                raise unavailable("Large requests cannot be read now. Try again.") from None
            return Body.parse(data)
        if kind is not Kind.FACTS:
            message, param = msgspec.json.decode(rest)
            raise ApiError(400, message, param=param, quotes=True)
        return Body.known(data, _FACTS.decode(rest))
