"""Work that nobody waits for, in pieces between which streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator


def piecewise(pieces: Iterator[None]) -> None:
    """Do the first piece now, and each further one in a later turn of the event loop."""
    for _ in pieces:
        asyncio.get_running_loop().call_soon(piecewise, pieces)
        return
