"""Request bodies are read: small ones here, large ones in a process of their own, for which no stream waits.

To split and look through 64 KiB takes 6 ms at most (of nothing but brackets; of text it takes 0.1); 10 MB of
the same take a second. The process starts with the first large body.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from tandem.router.body import Body
from tandem.router.counting_frames import Kind
from tandem.router.counting_process import CountingProcess, Limits, Unavailable
from tandem.router.errors import ApiError, unavailable
from tandem.router.facts import Facts

logger = logging.getLogger("tandem.router")

LARGE = 64 * 1024
"""Bytes of a body that is read elsewhere."""
HELP = 2**20
"""Bytes of a body that is read here all the same while there is no process."""

_COMMAND = (sys.executable, "-P", "-m", "tandem.router.reading_worker", "0")
_FACTS = msgspec.json.Decoder(Facts)


class Reading:
    def __init__(self, process: CountingProcess | None = None, *, patience: float = 10.0) -> None:
        """`patience`: seconds that a request waits for its body to be read."""
        self._process = process or CountingProcess(
            b"{}",
            command=_COMMAND,
            limits=Limits(patience=patience, waiting=64),
            name="the reading process",
            meanwhile="bodies of more than 1 MiB get a 503",
            waits=True,
        )
        self._begun = False

    async def read(self, data: bytes) -> Body:
        """A request's body. Raises ApiError 400 for one that may not be served, 503 where it cannot be read
        now."""
        if len(data) < LARGE:
            return Body.parse(data)
        if not self._begun:
            self._begun = True
            self._process.begin()
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

    async def aclose(self) -> None:
        await self._process.aclose()
