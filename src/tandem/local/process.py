"""One child process of a local endpoint: pinned, logged to a file, stopped with its whole group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.local import groups, launch
from tandem.local.errors import LocalError, ProcessDied
from tandem.local.files import open_to_append
from tandem.local.log import cause_of_death, error_in, mark_restart

_STOP_SECONDS = 10.0
_CHILDREN_SECONDS = 3.0
_OF_SIGNAL: dict[int, str] = {
    signal.SIGKILL: "; somebody killed it, or the kernel did, as it does when memory runs out (`dmesg` tells)"
}


@dataclass(frozen=True)
class ProcessSpec:
    """What to start. `env` is its whole environment (None: ours); `cpus` empty: not pinned."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    cpus: Sequence[int] = ()


class Process:
    """A started ProcessSpec."""

    def __init__(self, spec: ProcessSpec, log: Path, child: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.log = log
        self._child = child
        self._stopped = False

    @classmethod
    async def start(
        cls,
        spec: ProcessSpec,
        log: Path,
        *,
        restart: int = 0,
        announce: Callable[[int], None] = lambda pid: None,
    ) -> Process:
        """Start a process in a session of its own, both outputs into `log`, which begins anew unless it is
        the process's `restart`-th restart. Raises LocalError.

        `announce` is called with its pid before the program begins: if we are killed before that, it never
        does."""
        cpus = ",".join(map(str, spec.cpus)) or "-"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            # Appending, so that it can be emptied below the process.
            with _pipe() as (hold, release), open_to_append(log, anew=not restart) as out:
                if restart:
                    with contextlib.suppress(OSError):  # a full disk keeps nothing from running
                        out.write(mark_restart(spec.name, restart))
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", launch.__file__, "--when-told", cpus),
                    *spec.argv,
                    stdin=hold,
                    stdout=out,
                    stderr=out,
                    env=spec.env,
                    start_new_session=True,
                )
                announce(child.pid)
                os.write(release, b"\n")
        # ValueError: a NUL in an argument. RuntimeError: no thread can be started to wait for it.
        except (OSError, ValueError, RuntimeError) as error:
            raise LocalError(f"Cannot start {spec.name}: {error}") from None
        return cls(spec, log, child)

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.returncode is None

    async def ended(self) -> str:
        """Wait for its end; returns how it ended, and why in the log's own words."""
        code = await self._child.wait()
        if code >= 0:
            return f"{self.spec.name} ended with exit code {code}: {cause_of_death(self.log)}"
        why = error_in(self.log) or "no error in its log" + _OF_SIGNAL.get(-code, "")
        return f"{self.spec.name} was killed by {signal_name(-code)}: {why}"

    async def died(self) -> None:
        """Return never; raise ProcessDied with the log's own words when the process ends."""
        raise ProcessDied(f"{await self.ended()}\nIts log: {self.log}")

    async def stop(self, *, patience: float = _STOP_SECONDS) -> None:
        """End the process and its children: SIGTERM, then SIGKILL after `patience` seconds, or a moment after
        the end of the process itself."""
        if self._stopped:
            return  # by now its process group may be another's
        groups.ask_to_end(self.pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._child.wait()
        if not self.running:
            await self._children_end()
        groups.kill(self.pid)
        await self._child.wait()
        await self._children_end()
        groups.send(self.pid, signal.SIGKILL)
        self._stopped = True

    async def _children_end(self) -> None:
        """Wait for that, but not for long."""
        for _ in range(int(_CHILDREN_SECONDS / 0.05)):
            if not groups.send(self.pid, 0):
                break
            await asyncio.sleep(0.05)


def signal_name(number: int) -> str:
    """Real-time signals have no names of their own."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """The reading and the writing end."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)
