"""What all strategies share. A strategy chooses one engine among candidates: a small class without I/O whose
memory is bounded, and whose cost hardly depends on how many engines there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, NamedTuple, Protocol, TypeVar

from tandem.router.engines import Engine
from tandem.router.strategies.chain import NO_SPACE, Space, extend, root

T = TypeVar("T")

MANY = 8
"""Up to so many engines are all looked at for each request."""
DRAWN = 3
"""Of more, so many are drawn at random (power of d choices)."""
LEADERS = 3
"""Of more, so many of those are looked at that hold most of the prompt."""


_PIECE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a strategy may know of a request. None: not counted, counted without ids, or not said."""

    tokens: int | None = None
    ids: Sequence[int] | None = None
    space: Space = NO_SPACE
    session: str | None = None
    _chains: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def chain(self, block_size: int) -> list[int]:
        """The hashes of its full blocks, worked out once; none without ids. Not to be changed."""
        for _ in self.chaining(block_size):
            pass
        return self._chains[block_size]

    def chaining(self, block_size: int) -> Iterator[None]:
        """Work out what `chain` gives, in pieces of a fraction of a millisecond."""
        if block_size in self._chains:
            return
        ids = self.ids if self.ids is not None else ()
        hashes: list[int] = []
        at, piece = root(self.space, block_size), max(1, _PIECE_TOKENS // block_size) * block_size
        for first in range(0, len(ids), piece):
            if first:
                yield
            hashes += extend(at, ids[first : first + piece], block_size)
            at = hashes[-1] if hashes else at
        self._chains[block_size] = hashes


class Choice(NamedTuple):
    engine: Engine
    hit_tokens: int = 0
    """Tokens of the prompt that its cache is expected to hold."""
    scores: Mapping[str, float] = {}
    """URL → score of the engines that were compared; the lowest wins. Empty where none was worked out."""
    why: str = ""
    rank: int | None = None
    """The data-parallel rank that holds them; None: not known, or any."""


class Strategy(Protocol):
    reads_prompts: bool
    """Whether it needs the token ids of every prompt."""

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        """Pick one of at least one candidate; candidates come sorted by URL. A sequence that was given is
        never changed afterwards: another set of candidates is another sequence. Nothing is remembered: what
        would be chosen may be asked at any time."""
        ...

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        """A request goes to an engine: to the one just chosen, as a rule."""
        ...

    def gone(self, engine: Engine) -> None:
        """An engine has left, or has lost its cache."""
        ...


class Kept(Generic[T]):
    """What was worked out from a sequence of candidates, for as long as the same sequence is asked about.

    Fleets hand out the same lists until something changes, so the work is not done for each request.
    """

    def __init__(self, work: Callable[[Sequence[Engine]], T], most: int = 256) -> None:
        self._work = work
        self._most = most
        self._kept: dict[int, tuple[Sequence[Engine], T]] = {}

    def of(self, candidates: Sequence[Engine]) -> T:
        kept = self._kept.get(id(candidates))
        if kept is not None and kept[0] is candidates:
            return kept[1]
        if len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        value = self._work(candidates)
        self._kept[id(candidates)] = candidates, value
        return value

    def clear(self) -> None:
        self._kept.clear()


def draw(candidates: Sequence[Engine], rng: Random) -> Sequence[Engine]:
    """The engines to look at for their load: all of a few, some of many."""
    count = len(candidates)
    if count <= MANY:
        return candidates
    return [candidates[int(rng.random() * count)] for _ in range(DRAWN)]
