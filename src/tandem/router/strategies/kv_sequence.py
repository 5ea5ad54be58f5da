"""The order of one publisher's batches: which come next, which were missed, when it has begun anew. Sans-IO.

Batches carry consecutive numbers from 0. PUB/SUB loses what was published before the subscription and what
overflowed, but keeps the order, so a live number that is not above the last live one is a new publisher's.
A publisher can be asked to send again from a number on, as far back as it keeps them. vLLM's sends the whole
answer at once, and its socket drops what it has no room for, without a word: any but the first 1,000 batches,
and the end. So what comes up to a hole is taken, and the rest asked for, until nothing new comes.

To fill a gap one batch more is asked for than was missed: the last one had. If it is not the same, byte for
byte (it has a time stamp), the publisher has been restarted, or no longer keeps that far back: all that was
known is forgotten, and what it keeps is asked for from 0.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

_HELD = 20_000
_HELD_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Forget:
    """All that was known of the publisher is void. `complete`: what follows are its batches from the
    first."""

    complete: bool


class Sequence:
    """`out` collects what is to be done, in order; `ask` is the number to replay from while a replay is
    wanted or under way."""

    def __init__(self, *, replays: bool) -> None:
        """`replays`: whether the publisher can be asked."""
        self.out: deque[bytes | Forget] = deque()
        self.ask: int | None = 0 if replays else None
        self.counts: Counter[str] = Counter()
        """gap, lost (a gap that was not filled), restart, replayed (batches)."""
        self._replays = replays
        self._next: int | None = None
        self._last_live = -1
        self._last = b""
        # Of the replay under way: whether it is the first since all was forgotten; whether it has shown that
        # the publisher is the one that was known; whether it has shown the contrary, or has a hole.
        self.fresh = True
        self._proved = True
        self._broken = False
        # Whether it has brought anything new; whether it is the last attempt to fill a gap, or to begin anew.
        self._progress = False
        self._last_attempt = False
        self._tried = False
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0

    def live(self, number: int, payload: bytes) -> None:
        if self.ask is not None:
            self._hold(number, payload)
            return
        if self._next is not None and number <= self._last_live:
            self.counts["restart"] += 1
            self._next = None
        self._last_live = number
        if self._next is None:
            if number and self._may_ask():
                self._want(0)
                self._hold(number, payload)
                return
            self.out.append(Forget(complete=number == 0))
        elif number < self._next:
            return  # it came with a replay
        elif number > self._next:
            self.counts["gap"] += 1
            if self._may_ask():
                self._want(max(0, self._next - 1))
                self._hold(number, payload)
                return
            self.counts["lost"] += 1
            self.out.append(Forget(complete=False))
        self._deliver(number, payload)

    def replayed(self, number: int, payload: bytes) -> None:
        if self.ask is None or self._broken:
            return
        if self._next is None:
            self.out.append(Forget(complete=number == 0))
        elif number < self._next:
            self._proved = self._proved or (number == self._next - 1 and payload == self._last)
            return
        elif number > self._next or not self._proved:
            self._broken = True
            return
        self._progress = True
        self.counts["replayed"] += 1
        self._deliver(number, payload)

    @property
    def replay_is_over(self) -> bool:
        """Whether what else comes of the replay under way is of no use."""
        return self._broken

    def replay_ended(self) -> None:
        """The publisher has sent all it keeps, or what it has sent has a hole."""
        gap = bool(self._held) and self._held[0][0] > self._expected
        if self._progress and (gap or not self._held):
            self._want(self._expected - 1)  # it may have been cut short
        elif self.fresh:
            if self._next is None and not self._held:
                # Nothing was published yet.
                self.out.append(Forget(complete=True))
                self._next = 0
            self._go_on(tried=True)
        elif not (gap or self._broken or not self._proved):
            self._go_on()
        elif self._last_attempt:
            self._lose()
            self._go_on(tried=True)
        else:
            self._lose()
            self._last_attempt = True
            self._want(0)

    def replay_failed(self) -> None:
        """No answer, or none to the end."""
        if self._progress:
            self._want(self._expected - 1)
            return
        if self._broken:
            self._lose()
        self._go_on(tried=True)

    def check(self) -> None:
        """Have what may have been missed unnoticed sent again."""
        if self._replays and self.ask is None:
            self._want(max(0, self._expected - 1))

    def restarted(self) -> None:
        """The publisher is known to be another."""
        self.counts["restart"] += 1
        self._next, self._last_live = None, -1
        self._let_go()
        self._last_attempt = False
        self.out.clear()
        self.out.append(Forget(complete=False))
        if self._replays:
            self._want(0)

    @property
    def _expected(self) -> int:
        return self._next or 0

    def _may_ask(self) -> bool:
        return self._replays and not self._tried

    def _want(self, first: int) -> None:
        self.ask = first
        self.fresh = self._next is None
        self._proved = self.fresh or self._next == 0
        self._broken = False
        self._progress = False

    def _lose(self) -> None:
        self.counts["lost"] += 1
        self._next = None

    def _go_on(self, *, tried: bool = False) -> None:
        self.ask = None
        self._last_attempt = False
        held = list(self._held)
        self._let_go()
        if held:  # the first of them has been seen before, where it made the replay be wanted
            self._last_live = min(self._last_live, held[0][0] - 1)
        self._tried = tried
        for number, payload in held:
            self.live(number, payload)
        self._tried = False

    def _hold(self, number: int, payload: bytes) -> None:
        """Keep a batch until the replay is over; of too many the oldest are lost, which is a gap."""
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        while len(self._held) > _HELD or self._held_bytes > _HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[1])

    def _let_go(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _deliver(self, number: int, payload: bytes) -> None:
        self.out.append(payload)
        self._next, self._last = number + 1, payload
