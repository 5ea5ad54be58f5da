"""Becomes another program on given CPUs: `python launch.py [--when-told] CPUS PROGRAM ARGS…`, with CPUS as
`0,1` or `-`.

Stands between `tandem up` and each of its processes, so that a program is pinned before its first thread, and
does not begin before whoever has to end it knows of it: with --when-told it waits for a line on its standard
input, and ends where none can come any more.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> None:
    if argv[0] == "--when-told":
        argv = argv[1:]
        if not os.read(0, 1):
            sys.exit("error: tandem ended before this process began")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if argv[0] != "-" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(cpu) for cpu in argv[0].split(",")])
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        sys.exit(f"error: cannot run {argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
