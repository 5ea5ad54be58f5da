"""What is known of a local endpoint from outside: `state.json` in the folder of its logs, and a lock.

`tandem up` holds the lock for its life, and so does the reaper, which outlives it: an endpoint whose lock is
free has ended, and nothing of it is left. No pid could tell that: they are given anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tandem.local import paths, proc
from tandem.local.errors import LocalError
from tandem.local.files import at_once, open_to_read

Condition = Literal["starting", "ready", "hung", "restarting", "stopped"]
Phase = Literal["starting", "running", "stopping", "ended"]

Seconds = Annotated[float, Field(ge=0, lt=1e11)]
"""Since 1970, of a time that has a date."""

_STATE, _LOCK = "state.json", "lock"
_LONGEST = 4 << 20  # bytes of it that are read: thousands of processes
_TRIES = 10
_TRY_SECONDS = 0.05


class ProcessState(BaseModel):
    """One process of an endpoint."""

    name: str
    role: Literal["prefill", "decode", "router"]
    url: str
    port: int
    pid: int | None = None
    """Also its process group."""
    state: Condition = "starting"
    doing: str = ""
    """What there is to say of the state, in words."""
    restarts: int = 0
    restart_at: Seconds | None = None
    """When it is started again, of one that is `restarting`."""
    cause: str | None = None
    """Why it last died, since the endpoint was started."""


class EndpointState(BaseModel):
    """One endpoint, as its `tandem up` last wrote it down."""

    name: str
    url: str
    port: int
    pid: int
    """Of `tandem up`; together with `pid_started` (see tandem.local.proc) it names one process for ever."""
    pid_started: int | None
    state: Phase = "starting"
    since: Seconds = Field(default_factory=time.time)
    """When it came into this state."""
    cause: str | None = None
    """Why it ended."""
    processes: list[ProcessState] = []

    def become(self, state: Phase, cause: str | None = None) -> None:
        self.state, self.since = state, time.time()
        self.cause = self.cause or cause

    def save(self, folder: Path) -> bool:
        """Write it down, whole at once; whether that could be done. A disk that is full must not end what
        runs, so no error is raised."""
        try:
            new = folder / f".{_STATE}"
            with open(new, "w", encoding="utf-8", opener=at_once) as file:
                file.write(self.model_dump_json(indent=1))
            new.replace(folder / _STATE)
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Found:
    """An endpoint of this user: what was written down of it, and whether it runs."""

    folder: Path
    state: EndpointState
    running: bool

    @property
    def title(self) -> str:
        return f"{self.state.name} on port {self.state.port}"

    @property
    def phase(self) -> Phase:
        if not self.running:
            return "ended"
        # The reaper is still ending what a `tandem up` that was killed had started.
        return self.state.state if self.has_up else "stopping"

    @property
    def has_up(self) -> bool:
        """Whether its `tandem up` is there; another process that has its pid by now is none."""
        return proc.started(self.state.pid) == self.state.pid_started is not None

    def refresh(self) -> Found:
        return Found(self.folder, load(self.folder) or self.state, is_running(self.folder))

    @property
    def last_sign(self) -> float:
        """When anything of it was last written, a line of a log included, in seconds since 1970: of one that
        was killed, about when it ended."""
        times = [self.state.since]
        for file in self.folder.iterdir():
            with contextlib.suppress(OSError):
                times.append(file.stat().st_mtime)
        return max(times)

    @property
    def cause_of_end(self) -> str:
        """Why it ended, of one that does not run."""
        if self.state.cause is not None:
            return self.state.cause
        return "`tandem up` was killed, the machine went down, or its disk was full"


def find(name: str | None = None, port: int | None = None) -> list[Found]:
    """This user's endpoints, those that run and those that have ended, by name and port."""
    folders = [file.parent for file in sorted(paths.states().glob(f"*/*/{_STATE}"))]
    meant = [f for f in folders if name in (None, f.parent.name) and (port is None or f.name == str(port))]
    return [Found(f, state, is_running(f)) for f in meant if (state := load(f)) is not None]


def load(folder: Path) -> EndpointState | None:
    """What was last written down; None where there is nothing that can be read."""
    try:
        with open_to_read(folder / _STATE) as file:
            return EndpointState.model_validate_json(file.read(_LONGEST))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[int]:
    """Hold an endpoint's lock for the length of the block, which gets its file descriptor: a process that
    inherits it holds the lock, too. Raises LocalError when the endpoint runs already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalError(f"Cannot write into {folder}: {error.strerror}") from None
    try:
        for _ in range(_TRIES):
            if _locked(lock, fcntl.LOCK_EX):
                break
            time.sleep(_TRY_SECONDS)  # who only looks holds it for a moment
        else:
            raise _second(folder)
        yield lock
    finally:
        os.close(lock)


def hold_again(folder: Path, lock: int) -> None:
    """Where somebody has removed an endpoint's lock, perhaps with its folder, make it anew and hold that by
    the same file descriptor. Where that cannot be, nothing is done."""
    with contextlib.suppress(OSError, LocalError):
        if not (folder / _LOCK).exists():
            folder.mkdir(parents=True, exist_ok=True)
            again = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _locked(again, fcntl.LOCK_EX):
                os.dup2(again, lock, inheritable=False)
            os.close(again)


def refuse_second(folder: Path) -> None:
    """Raise LocalError when the endpoint of a folder runs already."""
    if is_running(folder):
        raise _second(folder)


def _second(folder: Path) -> LocalError:
    state = load(folder)
    if state is None:
        return LocalError(f"Another `tandem up` has just begun in {folder}.")
    if not Found(folder, state, running=True).has_up:
        return LocalError(
            f"What a killed `tandem up` has left of {state.name} on port {state.port} is just being ended. "
            "Try again in some seconds."
        )
    return LocalError(
        f"{state.name} is up on port {state.port} already, as process {state.pid}. Stop it with "
        f"`tandem down {state.name} --port {state.port}`, or choose another port with --port."
    )


def is_running(folder: Path) -> bool:
    try:
        lock = at_once(str(folder / _LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _locked(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _locked(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some file systems, of a network say, have no locks
        raise LocalError(
            f"Nothing can be locked in {paths.states()}: {error.strerror}. Set TANDEM_HOME to a folder on "
            "a disk of this machine."
        ) from None
    return True


def this_process() -> tuple[int, int | None]:
    """`pid` and `pid_started` of an EndpointState."""
    return os.getpid(), proc.started(os.getpid())
