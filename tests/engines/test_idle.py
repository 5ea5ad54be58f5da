"""What an endpoint of real engines costs while nobody asks it anything."""

from __future__ import annotations

import time
from pathlib import Path

from .conftest import Up, group_of
from .processes import cpu_seconds

SECONDS = 10.0
MOST = 0.1
"""Of one core, all processes of the endpoint together."""


def test_an_idle_endpoint_uses_less_than_a_tenth_of_a_core(smollm2: Up) -> None:
    """NIXL's progress threads would poll without a pause: a core for each engine.

    Only the endpoint's own CPU time counts, so a busy machine does not matter. What an earlier test left
    running may, so there are three tries at finding it idle.
    """
    for _ in range(3):
        shares = cpu_shares(group_of(smollm2))
        if sum(shares.values()) < MOST:
            return
    told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    raise AssertionError(f"an idle endpoint used {sum(shares.values()):.1%} of a core: {told}")


def cpu_shares(pids: list[int]) -> dict[str, float]:
    """Of one core, what each process uses while time passes; all live on."""
    before, begun = [cpu_seconds([pid]) for pid in pids], time.monotonic()
    time.sleep(SECONDS)  # a share of time needs time to pass
    seconds = time.monotonic() - begun
    used = [cpu_seconds([pid]) - earlier for pid, earlier in zip(pids, before, strict=True)]
    assert min(used) >= 0, "one has ended, and what it used is not known"
    return {f"{name(pid)} ({pid})": cpu / seconds for pid, cpu in zip(pids, used, strict=True)}


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
