"""Counting with the engines' own tokenizer files, which they serve beside their API.

A router that cannot mount the model fetches its files from the engines, once an engine is in use and again
when it has come back. While those in use serve the same files, and count as the router then does, prompts are
counted here; before, and whenever they differ (a rollout with another template), an engine counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tandem.config import RouterConfig
from tandem.router.counting import Counter
from tandem.router.counting_places import InProcesses, Place
from tandem.router.engines import Engine, State
from tandem.router.few import few
from tandem.router.fleet import Fleet
from tandem.router.helper_process import Unavailable, Unusable
from tandem.router.legs import Legs
from tandem.router.model_cache import Manifest, ModelCache
from tandem.router.model_fetch import Bounds, Fetched, Fetcher, NotFetched

logger = logging.getLogger("tandem.router")

# Digits of a digest that are shown.
_SHOWN = 12

# Engines that are named in one line of the log.
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds until something that failed is tried again: the first time, and at most; each is twice the one
    before."""

    first: float = 1.0
    longest: float = 300.0

    def after(self, failures: int) -> float:
        return min(self.first * 2.0 ** min(failures - 1, 30), self.longest)


@dataclass(slots=True)
class _Look:
    """What is known of one engine's files."""

    losses: int
    """The engine's, when it was looked at: one that was lost since may serve others."""
    fetched: Fetched | None = None
    """What it served when it last answered."""
    why: str = ""
    """Why what it serves now is not known, or ""."""
    failures: int = 0
    due: float = 0.0
    """When to look again after a failure."""


class ModelFiles:
    """Follows a fleet, and has a counter count here or not."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        legs: Legs,
        counter: Counter,
        *,
        bounds: Bounds | None = None,
        pauses: Pauses | None = None,
        start: Callable[[RouterConfig, Path], Awaitable[Place]] = InProcesses.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start`: loads a model's files; see `InProcesses.start`."""
        assert config.model_files_path is not None
        self._config = config
        self._path = config.model_files_path
        self._fleet = fleet
        self._legs = legs
        self._counter = counter
        self._bounds = bounds
        self._pauses = pauses or Pauses()
        self._start = start
        self._clock = clock
        self._counted = frozenset(config.counted_model)
        self._looks: WeakKeyDictionary[Engine, _Look] = WeakKeyDictionary()
        self._used: str | None = None  # the digest of what is counted with
        self._refuted: WeakKeyDictionary[Engine, tuple[str, int]] = WeakKeyDictionary()
        self._unusable: dict[str, str] = {}
        self._failures = 0  # to load
        self._due = 0.0
        self._why = "no engine's files have been fetched yet"  # why engines count, where they do
        self._said = ""
        self._changed = asyncio.Event()
        fleet.on_change(self._changed.set)

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        cache: ModelCache | None = None
        try:
            cache = await asyncio.to_thread(ModelCache, self._config.model_files_cache)
            fetcher = Fetcher(self._legs, cache, self._path, self._bounds)
            while True:
                try:
                    await self._step(cache, fetcher)
                except Exception:
                    logger.exception("following the engines' model files")
                    await self._leave()
                    await asyncio.sleep(self._pauses.longest)
        except OSError as error:
            self._stay(f"they cannot be kept: {error}", logging.ERROR)
        finally:
            await self._leave()
            if cache is not None:
                cache.close()

    async def _step(self, cache: ModelCache, fetcher: Fetcher) -> None:
        self._changed.clear()
        engine = self._next()
        if engine is not None:
            await self._look(engine, fetcher)
        await self._settle(cache)
        if engine is None:
            await self._wait()

    def told(self) -> dict[str, Any]:
        """How it stands, for the admin port."""
        here = self._counter.here is not None and self._used is not None
        return {
            "countedHere": here,
            "why": None if here else self._why,
            "files": _short(self._used) if self._used is not None and here else None,
            "engines": {e.url: self._told_of(e) for e in sorted(self._fleet.engines, key=lambda e: e.url)},
        }

    def _told_of(self, engine: Engine) -> str:
        look = self._looks.get(engine)
        if look is None:
            return "not fetched yet"
        known = self._known(engine)
        return _short(known.digest) if known is not None else look.why or "not fetched again yet"

    # Looking

    def _voters(self) -> list[Engine]:
        """The engines in use that serve what is counted: what they agree in counts."""
        return [
            e
            for e in self._fleet.engines
            if e.state is not State.WAITING and (not self._counted or e.model_ids & self._counted)
        ]

    def _next(self) -> Engine | None:
        """An engine to look at now, those that have failed before last."""
        now = self._clock()
        due = []
        for engine in self._voters():
            look = self._looks.get(engine)
            if look is None or look.losses != engine.losses:
                due.append((0, engine.url, engine))
            elif look.why and look.due <= now:
                due.append((look.failures, engine.url, engine))
        return min(due, key=lambda each: each[:2])[2] if due else None

    def _known(self, engine: Engine) -> Manifest | None:
        """What an engine serves now, as far as that is known."""
        look = self._looks.get(engine)
        if look is None or look.losses != engine.losses or look.why or look.fetched is None:
            return None
        return look.fetched.manifest

    async def _look(self, engine: Engine, fetcher: Fetcher) -> None:
        before = self._looks.get(engine) or _Look(engine.losses)
        look = _Look(engine.losses, before.fetched)
        try:
            look.fetched = await fetcher.fetch(engine, before.fetched)
        except NotFetched as reason:
            look.why, look.failures = str(reason), before.failures + 1
            look.due = self._clock() + self._pauses.after(look.failures)
            if look.why != before.why:
                logger.warning(
                    "the model files of %s cannot be fetched, which is tried again: %s", engine.url, look.why
                )
        self._looks[engine] = look

    async def _wait(self) -> None:
        """Until something changes, or is to be tried again."""
        dues = [look.due for e in self._voters() if (look := self._looks.get(e)) is not None and look.why]
        if self._failures:
            dues.append(self._due)
        pause = max(min(dues) - self._clock(), 0.0) if dues else None
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    # Deciding

    async def _settle(self, cache: ModelCache) -> None:
        """Count with what the engines in use agree in, or have them count."""
        for engine, losses in self._counter.differing.items():
            if self._used is not None:
                self._refuted[engine] = self._used, losses
        voters = self._voters()
        known = {e: manifest for e in voters if (manifest := self._known(e)) is not None}
        manifests = {manifest.digest: manifest for manifest in known.values()}
        if len(manifests) > 1:
            await self._leave()
            self._stay(_difference(known), logging.ERROR)
            return
        digest = next(iter(manifests), self._used)
        if digest is None:
            return
        refuting = [e for e in voters if self._refuted.get(e) == (digest, e.losses)]
        if refuting:
            await self._leave()
            self._stay(_refutation(refuting), logging.WARNING)
        elif digest in self._unusable:
            await self._leave()
            self._why = self._unusable[digest]
        elif manifests and (digest != self._used or self._counter.here is None):
            await self._load(cache, manifests[digest], list(known))

    async def _load(self, cache: ModelCache, manifest: Manifest, serving: list[Engine]) -> None:
        digest = manifest.digest
        await self._leave()
        if self._clock() < self._due:
            return
        self._due = 0.0
        self._why = "they are being loaded"
        try:
            model = await asyncio.to_thread(cache.model, manifest)
            place = await self._start(self._config, model)
        except Unusable as reason:
            self._unusable[digest] = str(reason)
            self._stay(str(reason), logging.WARNING)
            return
        except (Unavailable, OSError) as reason:
            self._failures += 1
            self._due = self._clock() + self._pauses.after(self._failures)
            self._stay(f"they cannot be loaded, which is tried again: {reason}", logging.WARNING)
            return
        self._failures = 0
        self._used = digest
        refuting = await self._counter.use(place)
        if refuting is not None:
            self._refuted[refuting] = digest, refuting.losses
            self._stay(_refutation([refuting]), logging.WARNING)
            return
        self._said = ""
        logger.info("prompts are counted here, with the model files %s of %s", _short(digest), _urls(serving))
        looks = [look for e in self._fleet.engines if (look := self._looks.get(e)) is not None]
        await asyncio.to_thread(cache.prune, [look.fetched.manifest for look in looks if look.fetched])

    async def _leave(self) -> None:
        if self._counter.here is not None:
            await self._counter.leave()

    def _stay(self, why: str, level: int) -> None:
        """Note why engines count, and say so when it is new."""
        if why != self._said:
            logger.log(level, "engines count prompts, which is slower: %s", why)
        self._why = self._said = why


def _short(digest: str) -> str:
    return digest[:_SHOWN]


def _urls(engines: Iterable[Engine]) -> str:
    return ", ".join(few(sorted(e.url for e in engines), _NAMED))


def _refutation(engines: list[Engine]) -> str:
    return f"{_urls(engines)} counts otherwise than with the model files that were fetched"


def _difference(known: dict[Engine, Manifest]) -> str:
    """In which files engines differ, and who has which."""
    by_digest: dict[str, list[Engine]] = {}
    for engine, manifest in known.items():
        by_digest.setdefault(manifest.digest, []).append(engine)
    seen = [
        {**manifest.files, **dict.fromkeys(manifest.marks, "there")}
        for manifest in {m.digest: m for m in known.values()}.values()
    ]
    names = sorted(name for name in set().union(*seen) if len({files.get(name) for files in seen}) > 1)
    parties = "; ".join(f"{_short(digest)} at {_urls(es)}" for digest, es in sorted(by_digest.items()))
    return f"they serve different model files ({', '.join(names)}): {parties}"
