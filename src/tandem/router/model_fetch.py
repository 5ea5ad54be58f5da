"""One engine's model files, over HTTP: fixed names below one path, bounded in size and time, no redirects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.http import Headers
from tandem.prompt import FILES, MARKS
from tandem.router.engines import Engine
from tandem.router.legs import LegFailed, Legs
from tandem.router.model_cache import Manifest, ModelCache

# Equal for equal bytes, and fit to be sent back.
_STRONG_TAG = re.compile(rb'"[\x21\x23-\x7e]{1,256}"')


@dataclass(frozen=True, slots=True)
class Bounds:
    """largest: bytes of one file. silence, whole: seconds that an engine may be silent, and take for all."""

    largest: int = 64 * 2**20
    silence: float = 10.0
    whole: float = 60.0


class NotFetched(Exception):
    """Why an engine's files cannot be had now."""


@dataclass(frozen=True)
class Fetched:
    manifest: Manifest
    tags: Mapping[str, bytes] = field(default_factory=dict)
    """The ETag of each file that has one."""


class Fetcher:
    def __init__(self, legs: Legs, cache: ModelCache, path: str, bounds: Bounds | None = None) -> None:
        """`path`: where engines serve the files; it ends in /."""
        self._legs = legs
        self._cache = cache
        self._path = path
        self._bounds = bounds or Bounds()

    async def fetch(self, engine: Engine, before: Fetched | None = None) -> Fetched:
        """What an engine serves, all of it in the cache. `before`: what it served once; a file with the same
        ETag is not sent again. Raises NotFetched."""
        try:
            async with asyncio.timeout(self._bounds.whole):
                return await self._fetch(engine, before or Fetched(Manifest()))
        except TimeoutError:
            raise NotFetched(f"they did not come within {self._bounds.whole:g} s") from None
        except LegFailed as failure:
            raise NotFetched(str(failure).removeprefix(f"{engine.url}: ")) from None
        except OSError as error:
            raise NotFetched(f"they cannot be kept: {error}") from None

    async def _fetch(self, engine: Engine, before: Fetched) -> Fetched:
        files, tags = {}, {}
        for name in FILES:
            got = await self._file(engine, name, before)
            if got is not None:
                files[name], tag = got
                if tag is not None and _STRONG_TAG.fullmatch(tag):
                    tags[name] = tag
        if not files:
            raise NotFetched(f"there are none at {self._path}")
        marks = frozenset([name for name in MARKS if await self._is_there(engine, name)])
        return Fetched(Manifest(files, marks), tags)

    async def _file(self, engine: Engine, name: str, before: Fetched) -> tuple[str, bytes | None] | None:
        """A file's content, by its hash, and its ETag; None where there is no such file."""
        known = before.manifest.files.get(name)
        tag = before.tags.get(name) if known is not None and self._cache.has(known) else None
        asked: Headers = [] if tag is None else [(b"if-none-match", tag)]
        silence = self._bounds.silence
        async with self._legs.open(
            engine, "GET", self._path + name, b"", asked, head_timeout=silence, idle_timeout=silence
        ) as response:
            if response.status == 404:
                return None
            if response.status == 304 and known is not None and tag is not None:
                return known, tag
            if response.status != 200:
                raise LegFailed(engine, "status", f"{self._path}{name} is answered HTTP {response.status}")
            data, tag = await response.read(self._bounds.largest), response.header(b"etag")
        return await asyncio.to_thread(self._cache.keep, data), tag

    async def _is_there(self, engine: Engine, name: str) -> bool:
        silence = self._bounds.silence
        async with self._legs.open(
            engine, "HEAD", self._path + name, b"", [], head_timeout=silence, idle_timeout=silence
        ) as response:
            if response.status not in (200, 404):
                raise LegFailed(engine, "status", f"{self._path}{name} is answered HTTP {response.status}")
            return response.status == 200
