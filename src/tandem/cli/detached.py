"""`tandem up --detach`: the same command as a process that outlives this one and its terminal."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tandem.cli import ENVIRONMENT, FAILURE, INTERRUPTED, OK, complain

_POLL_SECONDS = 0.1


def start(words: Sequence[str], folder: Path, *, as_json: bool) -> int:
    """Run `tandem WORDS`, less --detach, and return its exit code, or OK when the endpoint is ready.

    What it says goes to `up.log` in `folder`, and until it is ready to our stderr, too."""
    from tandem.cli.console import err, out
    from tandem.local.files import open_to_append
    from tandem.local.folders import write_problem
    from tandem.local.log import CONSOLE
    from tandem.local.process import signal_name

    command = [sys.executable, "-P", "-m", "tandem", *(w for w in words if w != "--detach"), "--json"]
    log = folder / CONSOLE
    if problem := write_problem(folder, "logs"):
        complain(problem)
        return ENVIRONMENT
    try:
        console = open_to_append(log, anew=True)  # so that it can be emptied below the process
    except OSError as error:
        complain(f"Cannot write into {folder}: {error.strerror}")
        return ENVIRONMENT
    with console, log.open("rb") as shown, _signals():
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=console, start_new_session=True
        )
        assert child.stdout is not None
        with child.stdout:
            try:
                ready = _result(child.stdout, shown)
            except KeyboardInterrupt:
                child.terminate()
                child.wait()
                _show(shown)
                return INTERRUPTED
        if not ready:
            code = child.wait()
            _show(shown)
            if code == OK:  # it was told to end
                complain(f"`tandem up` was stopped before it was ready. Its log: {log}")
                return INTERRUPTED
            if code < 0:
                complain(f"`tandem up` was killed by {signal_name(-code)}. Its log: {log}")
            elif problem := write_problem(folder, "logs"):  # so it could not say why
                complain(problem)
            return code if code > 0 else FAILURE
        child.returncode = 0  # it is nobody's child from now on; Popen would complain
    if as_json:
        print(ready.decode(), end="")
    else:
        told = json.loads(ready)
        err.print(f"it runs in the background, as process {told['pid']}", markup=False)
        out.print(f"{told['url']}\n{told['curl']}", markup=False)
    return OK


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM is as Ctrl-C here; what is started inside the block ignores SIGHUP, and so do we."""
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result(stdout: IO[bytes], log: IO[bytes]) -> bytes:
    """The line that tells that the endpoint is ready, empty if it ended before; shows the log meanwhile."""
    while not select.select([stdout], [], [], _POLL_SECONDS)[0]:
        _show(log)
    line = stdout.readline()
    _show(log)
    return line


def _show(log: IO[bytes]) -> None:
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(log.read().decode("utf-8", "replace"))
        sys.stderr.flush()
