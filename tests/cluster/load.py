"""Requests without a break, while something happens to what answers them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx

from .endpoint import LONG, SHORT, Cut, Endpoint, chunks


@dataclass
class Load:
    answered: int = 0
    cut: list[str] = field(default_factory=list)
    """Streams that had begun and ended with an error event: when, and how."""
    failed: list[str] = field(default_factory=list)
    """All else that was not answered in full."""

    def answers(self, number: int) -> bool:
        """Whether there are so many answers; for `wait_for`."""
        return self.answered >= number


@contextmanager
def load(endpoint: Endpoint, *, clients: int = 4) -> Iterator[Load]:
    """Keep that many requests running: short and long prompts, streamed and whole answers in turn. After the
    block each of them is counted."""
    seen, stop, started, lock = Load(), threading.Event(), time.monotonic(), threading.Lock()

    def client(number: int) -> None:
        for i in count(number):
            if stop.is_set():
                return
            # Prompts differ from their beginning on, or caches would answer.
            prompt, streamed = f"{number} {i} {LONG if i % 2 else SHORT}", i % 4 >= 2
            kind = f"{'long' if i % 2 else 'short'}{' streamed' * streamed}"
            trouble: Exception | None = None
            try:
                _ask(endpoint, prompt, streamed=streamed)
            except (Cut, AssertionError, httpx.HTTPError, ValueError) as error:
                trouble = error
            with lock:
                if trouble is None:
                    seen.answered += 1
                else:
                    into = seen.cut if isinstance(trouble, Cut) else seen.failed
                    into.append(f"{time.monotonic() - started:.1f} s, {kind}: {trouble!r}")

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask(endpoint: Endpoint, prompt: str, *, streamed: bool) -> None:
    """Ask once; an answer that is not whole is an error."""
    if streamed:
        with endpoint.stream(prompt) as reply:
            last = list(chunks(reply))[-1]
    else:
        reply = endpoint.ask(prompt)
        assert reply.status_code == 200, f"{reply.status_code} {reply.text}"
        last = reply.json()
    assert last["choices"][0]["finish_reason"] in ("length", "stop"), last
