"""Waits until an engine has nothing more to do; run before its container is ended.

First some seconds in which routers learn that the pod leaves, then until the engine says that it neither runs
requests nor has any waiting, then some seconds in which others fetch what it holds. An engine that does not
answer is looked at again: in the middle of a long prefill it may be silent for a while. One that nobody can
connect to has ended.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def busy(page: str) -> bool:
    """Whether a page of metrics tells of a request."""
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in BUSY and float(value) > 0:
            return True
    return False


def look(url: str, timeout: float) -> bool:
    """Whether the engine has something to do; also True when it is silent."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as page:
            return busy(page.read().decode("utf-8", "replace"))
    except urllib.error.URLError as error:
        return not isinstance(error.reason, ConnectionRefusedError)
    except (OSError, ValueError):
        return True


def drain(
    is_busy: Callable[[], bool],
    leave: float,
    limit: float,
    linger: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait; True when the engine was idle before `limit` seconds were over."""
    sleep(leave)
    end = clock() + limit
    idle = 0
    while idle < 2:  # twice: between two requests there may be a moment of rest
        if clock() > end:
            return False
        idle = 0 if is_busy() else idle + 1
        sleep(1.0)
    sleep(linger)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", required=True, help="URL of the engine's metrics")
    for name in ("leave", "limit", "linger"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="seconds")
    given = parser.parse_args()
    idle = drain(lambda: look(given.metrics, 10.0), given.leave, given.limit, given.linger)
    return 0 if idle else 1


if __name__ == "__main__":
    sys.exit(main())
