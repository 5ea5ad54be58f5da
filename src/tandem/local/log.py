"""The log of a process: what it tells of the process, and how it is kept small."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from tandem.local.files import open_to_read

LARGEST = 64 << 20
"""Bytes that a log may have; beyond, it becomes NAME.log.1, in the place of an older one, and begins anew."""

CONSOLE = "up.log"
"""What `tandem up --detach` would have shown."""

_RESTARTED = "==== tandem: restart "

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

# The last of these found in an engine's log is how far its start has come.
_STAGES = (
    ("importing vLLM", re.compile(r"")),
    ("starting the engine", re.compile(r"Initializing a V1 LLM engine|non-default args")),
    ("loading the weights", re.compile(r"Starting to load model|Loading (weights|safetensors)")),
    ("allocating the KV cache", re.compile(r"KV cache size|init engine")),
    ("opening its port", re.compile(r"Starting vLLM (API )?server")),
    ("answering", re.compile(r"Application startup complete")),
)

LAST_STAGE = _STAGES[-1][0]

_PORT_TAKEN = re.compile(r"Address already in use \(addr='tcp://[^']*:(\d+)'\)")
_START_BYTES = 256 * 1024
"""More than an engine writes while it starts."""


def mark_restart(name: str, number: int) -> bytes:
    """The line between what a process wrote before it died and what it writes when started again."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{_RESTARTED}{number} of {name}, {now} ====\n".encode()


def stage(log: Path) -> str:
    """How far an engine's last start has come."""
    text = _since_start(log, _START_BYTES)
    return next(name for name, seen in reversed(_STAGES) if seen.search(text))


def taken_port(log: Path) -> int | None:
    """The port on which an engine's last start could not listen for NIXL, as another program had it. Only a
    thread ends of that: vLLM waits for it for ever."""
    found = _PORT_TAKEN.search(_since_start(log, _START_BYTES))
    return int(found[1]) if found else None


def cause_of_death(log: Path) -> str:
    """What a log says of why its process died: the last exception, else error, else the last line."""
    lines = _last_lines(log)
    return error_in(log) or (_LOG_PREFIX.sub("", lines[-1])[:500] if lines else "it wrote nothing")


def error_in(log: Path) -> str | None:
    """The last exception of a log, else its last error, if there is one."""
    lines = _last_lines(log)
    lines = [line for line in lines if not _STANDS_ABOVE.search(line)] or lines
    backwards = range(len(lines) - 1, -1, -1)
    at = next((i for cause in _CAUSES for i in backwards if cause.search(lines[i])), None)
    if at is None:
        return None
    cause = lines[at : at + 2] if _GOES_ON.search(lines[at]) else [lines[at]]
    return ": ".join(_LOG_PREFIX.sub("", line, count=1) for line in cause)[:500]


def _last_lines(log: Path) -> list[str]:
    before, up, after = _since_start(log, 64 * 1024).rpartition("Application startup complete")
    # What went wrong while the engine started is no reason once it has been up.
    text = after.partition("\n")[2] if up else before + after
    return [line.strip() for line in text.splitlines() if line.strip()]


def _since_start(log: Path, size: int) -> str:
    """Of the last `size` bytes of a log, what its process has written since it was last started."""
    before, restarted, after = _tail(log, size).rpartition(_RESTARTED)
    return after.partition("\n")[2] if restarted else before + after


def _tail(log: Path, size: int) -> str:
    """The last `size` bytes of a file as text; of one that cannot be read, why."""
    try:
        with open_to_read(log) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            return stream.read(size).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"error: {log} cannot be read: {error.strerror}"


def keep_small(log: Path, largest: int = LARGEST) -> None:
    """Put a log that has grown too large aside. Its process has it open, and appends: so it is copied and
    emptied, and what is written just then may be lost."""
    with contextlib.suppress(OSError):  # it need not be there, and a full disk stops no engine
        if log.stat().st_size > largest:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def remove_old(folder: Path) -> None:
    """Remove the logs of earlier runs; not the one that our own messages go to."""
    for log in (*folder.glob("*.log"), *folder.glob("*.log.1")):
        with contextlib.suppress(OSError):
            if not os.path.samestat(log.stat(), os.fstat(2)):
                log.unlink()
