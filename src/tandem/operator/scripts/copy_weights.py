"""Copies a folder of weights into another, several files at once; run before the engine starts.

A file that is there already with the same size is left as it is, so a container that is started again goes on
where it was. Each file gets its name only when it is whole.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AT_ONCE = 16


def copy_file(source: Path, target: Path) -> int:
    """Copy one file; returns the bytes that were copied."""
    size = source.stat().st_size
    if target.exists() and target.stat().st_size == size:
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    shutil.copyfile(source, part)
    os.replace(part, target)
    return size


def copy(source: Path, target: Path) -> tuple[int, int]:
    """Copy all files below `source`; returns their number and the bytes that were copied."""
    found = [path for path in sorted(source.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(AT_ONCE) as workers:
        sizes = list(workers.map(lambda path: copy_file(path, target / path.relative_to(source)), found))
    return len(found), sum(sizes)


def main() -> int:
    source, target = (Path(word) for word in sys.argv[1:3])
    files, size = copy(source, target)
    if not files:
        print(f"{source}: holds no files; is spec.modelSourceConfig.modelLocation right?", file=sys.stderr)
        return 1
    print(f"{files} files, {size:,} bytes copied from {source} to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
