"""Becomes another program on given CPUs: `python launch.py CPUS PROGRAM ARGS…`, with CPUS as `0,1` or `-`.

Stands between `tandem up` and each of its processes, so that a program is pinned before its first thread.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> None:
    if argv[0] != "-" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(cpu) for cpu in argv[0].split(",")])
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        sys.exit(f"error: cannot run {argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
