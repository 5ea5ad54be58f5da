"""One child process of a local endpoint: pinned, logged to a file, stopped with its whole group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.local import launch
from tandem.local.errors import LocalError, ProcessDied

_STOP_SECONDS = 10.0
_CHILDREN_SECONDS = 3.0
# Lines of a log that name the cause of a death, best first: an exception's last line, an error record.
_CAUSES = (
    re.compile(r"^(?!.*\b(INFO|WARNING)\b).*\b\w*(Error|Exception)\b: "),
    re.compile(r"^(?!.*\b(INFO|WARNING)\b).*(\berror: |\bERROR\b|Killed)"),
)
# What vLLM's API server says last when an engine core dies: the cause stands further up.
_STANDS_ABOVE = re.compile(r"See (root cause|stack trace) ")
# The first line of a pydantic error, whose next line says what is wrong.
_GOES_ON = re.compile(r"validation errors? for \w+$")
_LOG_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(ERROR|CRITICAL)?\s*(\d\d-\d\d )?[\d:.]* *(\[[\w.]+:\d+\] )?")


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

    @classmethod
    async def start(cls, spec: ProcessSpec, log: Path) -> Process:
        """Start a process in a session of its own, both outputs into `log`. Raises LocalError."""
        cpus = ",".join(map(str, spec.cpus)) or "-"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as out:
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", launch.__file__, cpus),
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=spec.env,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            raise LocalError(f"Cannot start {spec.name}: {error}") from None
        return cls(spec, log, child)

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.returncode is None

    async def died(self) -> None:
        """Return never; raise ProcessDied with the log's own words when the process ends."""
        code = await self._child.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ProcessDied(f"{self.spec.name} {how}: {cause_of_death(self.log)}\nIts log: {self.log}")

    async def stop(self, *, patience: float = _STOP_SECONDS) -> None:
        """End the process and its children: SIGTERM, then SIGKILL after `patience` seconds."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._child.wait()
        # Its children get a moment too: Python's resource tracker frees what the others left in /dev/shm.
        for _ in range(int(_CHILDREN_SECONDS / 0.05)):
            if self._child.returncode is None or not self._signal(0):
                break
            await asyncio.sleep(0.05)
        self._signal(signal.SIGKILL)
        await self._child.wait()

    def _signal(self, number: int) -> bool:
        """Signal the process group; whether there is one."""
        try:
            os.killpg(self._child.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def cause_of_death(log: Path) -> str:
    """What a log says of why its process died: the last exception, else error, else the last line."""
    # What went wrong while the engine started is no reason once it has been up.
    text = tail(log, 64 * 1024).rpartition("Application startup complete")[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it wrote nothing"
    lines = [line for line in lines if not _STANDS_ABOVE.search(line)] or lines
    backwards = range(len(lines) - 1, -1, -1)
    at = next((i for cause in _CAUSES for i in backwards if cause.search(lines[i])), len(lines) - 1)
    cause = lines[at : at + 2] if _GOES_ON.search(lines[at]) else [lines[at]]
    return ": ".join(_LOG_PREFIX.sub("", line, count=1) for line in cause)[:500]


def tail(log: Path, size: int) -> str:
    """The last `size` bytes of a file as text."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - size))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
