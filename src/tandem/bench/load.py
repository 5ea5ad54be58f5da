"""Timed completions of exact length, alone and as loads of many.

Prompts are token ids that nobody has sent before, so their lengths are exact and no prefix cache holds them;
answers have exactly the tokens asked for. Times are the running loop's, so that virtual time works too
(`sim.virtual`); real time needs asyncio's own loop, as uvloop's clock counts whole milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.http import Client, ConnectFailed, HTTPClientError, Origin

# Ids that are words in any vocabulary: special tokens and bytes lie below, and small vocabularies end above.
_FIRST_ID, _LAST_ID = 300, 30_000
_BODY_BYTES = 64 << 20
# Silence is no failure here: a long prompt computes for a minute before its first token.
_PATIENCE = 600.0


class LoadError(Exception):
    """A server did not answer as asked; the message names it and says how it answered."""


class Unreachable(LoadError):
    """Nobody listens there."""


@dataclass(frozen=True)
class Timing:
    """When one streamed answer's tokens came, in seconds; `sent` is on the loop's clock."""

    prompt_tokens: int
    sent: float
    ttft: float
    gaps: tuple[float, ...] = ()
    """Between one token and the next."""

    @property
    def times(self) -> list[float]:
        """On the loop's clock, of each token."""
        times = [self.sent + self.ttft]
        for gap in self.gaps:
            times.append(times[-1] + gap)
        return times


class Prompts:
    """Prompts of unique token ids, the same ones for the same seed."""

    def __init__(self, seed: int | str | None = None, *, vocabulary: int = _LAST_ID) -> None:
        self._random = random.Random(seed)
        self._ids = range(min(_FIRST_ID, vocabulary // 2), vocabulary)

    def __call__(self, tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=tokens)


async def ask(client: Client, origin: Origin, path: str, body: Any = None) -> bytes:
    """One plain answer: GET, or POST of a JSON body. Raises LoadError, also when nobody listens."""
    data = b"" if body is None else json.dumps(body).encode()
    try:
        async with client.stream(
            origin,
            "GET" if body is None else "POST",
            path.encode(),
            [(b"content-type", b"application/json")] if data else [],
            data,
            head_timeout=_PATIENCE,
        ) as response:
            answer = await response.read(_BODY_BYTES)
            if response.status != 200:
                said = answer[:300].decode("utf-8", "replace")
                raise LoadError(f"{origin}{path} answered HTTP {response.status}: {said}")
            return answer
    except HTTPClientError as error:
        raise _told(error) from None


def completion(model: str, prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy completion of exactly so many tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }


async def timed(
    client: Client,
    origin: Origin,
    body: dict[str, Any],
    *,
    on_token: Callable[[float], None] = lambda time: None,
) -> Timing:
    """Stream a completion and time its tokens; `on_token` is called with the loop's time as each comes.

    Raises LoadError for any answer but a whole one.
    """
    data = json.dumps({**body, "stream": True}).encode()
    now = asyncio.get_running_loop().time
    events = _Events(now, on_token)
    sent = now()
    try:
        async with client.stream(
            origin,
            "POST",
            b"/v1/completions",
            [(b"content-type", b"application/json")],
            data,
            head_timeout=_PATIENCE,
            idle_timeout=_PATIENCE,
            retry=False,
        ) as response:
            if response.status != 200:
                said = (await response.read(_BODY_BYTES))[:300].decode("utf-8", "replace")
                raise LoadError(f"{origin} answered HTTP {response.status}: {said}")
            await response.relay(events.feed)
    except HTTPClientError as error:
        raise _told(error) from None
    if events.error or not events.times:
        raise LoadError(f"{origin} ended its stream with {events.error or 'no token'}")
    gaps = tuple(b - a for a, b in zip(events.times, events.times[1:], strict=False))
    return Timing(len(body["prompt"]), sent, events.times[0] - sent, gaps)


def _told(error: HTTPClientError) -> LoadError:
    return Unreachable(str(error)) if isinstance(error, ConnectFailed) else LoadError(str(error))


@dataclass
class _Events:
    """Takes a stream's bytes and notes when its tokens came."""

    now: Callable[[], float]
    on_token: Callable[[float], None]
    times: list[float] = field(default_factory=list)
    error: str = ""
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        now = self.now()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = str(event["error"])
            elif event.get("choices"):
                self.times.append(now)
                self.on_token(now)
