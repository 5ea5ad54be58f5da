"""session: the same engine for the same session, by consistent hashing with bounded load.

Each engine has points on a ring, by hashes of its URL; a session belongs to the first point after its own
hash whose engine is a candidate and has room. Routers that know the same engines agree without talking.
(V. Mirrokni, M. Thorup, M. Zadimoghaddam: Consistent Hashing with Bounded Loads, 2016.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from tandem.router.engines import Engine
from tandem.router.strategies.base import MANY, Choice, Kept, Prompt
from tandem.router.strategies.leastloaded import LeastLoaded

POINTS = 512
"""Points of an engine: its share of the ring is then within 13 % of the mean at three sigma."""
SLACK = 1.25
"""How much more than the mean an engine may have in flight before sessions go past it."""
_TRIED = 64  # engines with no room that are passed before the search ends


class Session:
    """Without a session id it takes the least loaded engine."""

    reads_prompts = False

    def __init__(self, *, slack: float = SLACK, rng: Random | None = None) -> None:
        self._slack = slack
        self._rest = LeastLoaded(rng)
        self._ring: list[tuple[int, str]] = []
        self._urls: dict[str, int] = {}  # URL → engines that have it
        self._known: set[Engine] = set()
        self._members: Kept[_Members] = Kept(self._join)

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        if prompt.session is None:
            choice = self._rest.choose(prompt, candidates)
            return choice._replace(why=f"no session id: {choice.why}")
        members = self._members.of(candidates)
        room = math.ceil(self._slack * (members.in_flight() + 1) / len(candidates))
        passed: list[Engine] = []
        at = bisect_right(self._ring, (_hash(prompt.session), ""))
        for i in range(len(self._ring)):
            _, url = self._ring[(at + i) % len(self._ring)]
            engine = members.by_url.get(url)
            if engine is None or engine in passed:
                continue
            if engine.in_flight < room:
                why = "session" if not passed else f"session: {len(passed)} before it had no room"
                return Choice(engine, scores={e.url: e.in_flight for e in (*passed, engine)}, why=why)
            passed.append(engine)
            if len(passed) == min(_TRIED, len(members.by_url)):
                break
        choice = self._rest.choose(prompt, passed)
        return choice._replace(why="session: none had room")

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        self._rest.sent(prompt, engine)

    def gone(self, engine: Engine) -> None:
        if engine in self._known:
            self._known.remove(engine)
            self._members.clear()
            self._urls[engine.url] -= 1
            if not self._urls[engine.url]:
                del self._urls[engine.url]
                self._ring = [point for point in self._ring if point[1] != engine.url]

    def _join(self, candidates: Sequence[Engine]) -> _Members:
        """Engines stay on the ring while they are no candidates, so that others keep their sessions."""
        new: list[tuple[int, str]] = []
        for engine in candidates:
            if engine not in self._known:
                self._known.add(engine)
                if engine.url not in self._urls:
                    new += [(_hash(f"{i} {engine.url}"), engine.url) for i in range(POINTS)]
                self._urls[engine.url] = self._urls.get(engine.url, 0) + 1
        if new:
            self._ring = sorted(self._ring + new)
        return _Members(candidates)


class _Members:
    """Candidates by URL, and how many requests they have in flight."""

    def __init__(self, candidates: Sequence[Engine]) -> None:
        self.by_url = {e.url: e for e in candidates}
        self._candidates = candidates
        self._every = max(1, len(candidates) // MANY)
        self._asked = 0
        self._sum = 0

    def in_flight(self) -> int:
        """Of many engines the sum is worked out for every few questions only."""
        if self._asked % self._every == 0:
            self._sum = sum(e.in_flight for e in self._candidates)
        self._asked += 1
        return self._sum


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
