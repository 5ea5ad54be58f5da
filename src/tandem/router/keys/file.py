"""The file of API keys: read at the start, and again when it changes. A bad one then changes nothing but what
is said of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.router.keys.key import ApiKey
from tandem.router.keys.key_list import SIZE_LIMIT, read_keys
from tandem.router.keys.store import KeyStore
from tandem.router.listing import BadList
from tandem.router.trouble import Trouble
from tandem.router.watched_file import WatchedFile

logger = logging.getLogger("tandem.router")


def keys_of(path: str) -> tuple[ApiKey, ...]:
    """The keys that a file lists. Raises ValueError, which names the file."""
    return _load(WatchedFile(path, size_limit=SIZE_LIMIT))[1]


def _load(file: WatchedFile) -> tuple[bytes, tuple[ApiKey, ...]]:
    content = file.read()
    if isinstance(content, str):
        raise ValueError(f"{file.path}: {content}")
    try:
        return content, read_keys(content)
    except BadList as error:
        raise ValueError(f"{file.path}: {error}") from None


class KeyFile(Collector):
    """Raises ValueError where the file cannot be used at the start. Its metrics are for as many keys as the
    file has: what a key has used is forgotten when it leaves."""

    def __init__(
        self,
        path: str,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = WatchedFile(path, size_limit=SIZE_LIMIT, sleep=sleep)
        self._trouble = Trouble(f"API keys of the file {path}")
        try:
            self._content, keys = _load(self._file)
        except ValueError as error:
            raise ValueError(f"--api-keys-file: {error}") from None
        self.store = KeyStore(keys, clock)
        self._told()

    @property
    def trouble(self) -> str | None:
        """What is wrong with the file now, where, and what comes of it."""
        return self._trouble.text

    async def follow(self) -> None:
        """Keep to the file until cancelled."""
        async for content in self._file.contents():
            if content == self._content:
                self._trouble.over()
            elif isinstance(content, str):
                self._tell(content)
            else:
                await self._take(content)

    async def _take(self, content: bytes) -> None:
        try:
            keys = await asyncio.to_thread(read_keys, content)
        except BadList as error:
            self._tell(f"{error}. Correct it")
            return
        self._content = content
        self.store.replace(keys)
        self._trouble.over()
        self._told()

    def _told(self) -> None:
        if len(self.store):
            logger.info("API keys of the file %s: %d", self._file.path, len(self.store))
        else:
            logger.warning(
                "API keys of the file %s: it lists none, so every request is refused", self._file.path
            )

    def _tell(self, what: str) -> None:
        self._trouble.tell(f"{what}; until then the {len(self.store)} that it listed before stay")

    def collect(self) -> Iterator[Metric]:
        known = GaugeMetricFamily("tandem_api_keys", "API keys that are known.")
        known.add_metric((), len(self.store))
        stale = GaugeMetricFamily(
            "tandem_api_keys_stale",
            "1 while the file of API keys cannot be used, and those it listed before stay; else 0.",
        )
        stale.add_metric((), self.trouble is not None)
        requests = CounterMetricFamily(
            "tandem_api_key_requests", "Generation requests that were let in, by key.", labels=("key",)
        )
        refused = CounterMetricFamily(
            "tandem_api_key_refused",
            "Requests that were refused for their key, and why; those without a known key have none.",
            labels=("key", "reason"),
        )
        tokens = CounterMetricFamily(
            "tandem_api_key_tokens", "Tokens as they count for limits, by key.", labels=("key", "kind")
        )
        running = GaugeMetricFamily(
            "tandem_api_key_requests_running", "Requests that are served or wait, by key.", labels=("key",)
        )
        for reason, count in self.store.refused.items():
            refused.add_metric(("", reason), count)
        for account in self.store:
            name = account.key.name
            requests.add_metric((name,), account.requests)
            running.add_metric((name,), account.running)
            tokens.add_metric((name, "prompt"), account.prompt_tokens)
            tokens.add_metric((name, "generated"), account.generated_tokens)
            for reason, count in account.refused.items():
                refused.add_metric((name, reason), count)
        yield known
        yield stale
        yield requests
        yield refused
        yield tokens
        yield running
