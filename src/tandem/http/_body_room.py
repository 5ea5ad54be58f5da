"""How much of its requests' bodies a server holds at once."""

import time
from collections.abc import Callable

SMALL_BODY = 64 * 1024
"""Bytes of a body that needs no room: as much as a connection may hold of an answer, too."""


class BodyRoom:
    """Room for the large bodies of a server's requests, each from its first byte until its handler has ended
    or dropped it.

    Bytes count as they come, not as they are announced: nobody holds room that they have not filled. Where
    none is left, a body is turned away; unless another has been coming for `patience` seconds and more, which
    then makes way for it. So whoever drips keeps nobody out.
    """

    def __init__(self, most: int, patience: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.held = 0
        self._most = most
        self._patience = patience
        self._clock = clock
        self._coming: dict[Share, float] = {}
        """Whose bodies are not whole yet, and since when, the oldest first."""

    def fits(self, size: int) -> bool:
        """Whether there is, or can be made, room for so many bytes more."""
        return self.held + size <= self._most or self._slowest() is not None

    def take(self, share: "Share", size: int) -> bool:
        """Room for so many bytes more of the body that comes; False: there is none."""
        while self.held + size > self._most:
            slowest = self._slowest()
            if slowest is None or slowest is share:
                return False
            slowest.make_way()
        self.held += size
        if share not in self._coming:
            self._coming[share] = self._clock()
        return True

    def whole(self, share: "Share") -> None:
        """No body is coming for it any more."""
        self._coming.pop(share, None)

    def _slowest(self) -> "Share | None":
        for share, since in self._coming.items():
            return share if self._clock() - since >= self._patience else None
        return None


class Share:
    """What one connection holds of a room."""

    __slots__ = ("_room", "held", "make_way")

    def __init__(self, room: BodyRoom, make_way: Callable[[], None]) -> None:
        """`make_way` is to give back what the body that is coming holds."""
        self.held = 0
        self.make_way = make_way
        self._room = room

    def close(self) -> None:
        """Its owner receives no more bodies; lets go of the owner."""
        self.make_way = _nothing

    def fits(self, size: int) -> bool:
        return size <= SMALL_BODY or self._room.fits(size)

    def take(self, size: int) -> bool:
        if not self._room.take(self, size):
            return False
        self.held += size
        return True

    def whole(self) -> None:
        self._room.whole(self)

    def give(self, size: int) -> None:
        self.held -= size
        self._room.held -= size


def room_of(body: bytes) -> int:
    """What a whole body takes."""
    return len(body) if len(body) > SMALL_BODY else 0


def _nothing() -> None:
    pass
