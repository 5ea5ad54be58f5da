"""Becomes another program: `python launch.py CPUS PROGRAM ARGS…`, with CPUS as `0,1` or `-` for any.

Run between `tandem up` and each of its processes, so that the program starts pinned, and is killed by
the kernel if `tandem up` dies without stopping it (kill -9). Stands alone: it may run in any interpreter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    parent = int(os.environ.pop("TANDEM_LAUNCH_PARENT"))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if argv[0] != "-":
            os.sched_setaffinity(0, [int(cpu) for cpu in argv[0].split(",")])
    if os.getppid() != parent:  # it died before the request above took effect
        raise SystemExit(1)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        raise SystemExit(f"error: cannot run {argv[1]}: {error.strerror}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
