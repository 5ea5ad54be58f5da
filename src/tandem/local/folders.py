"""Whether what an endpoint writes has a place: folders that can be written to, that are nobody else's where
others could make them first, and room on their disks."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from tandem.local.errors import LocalError

_PROBE = bytes(4096)  # one page: less may fit where a log would not
ELSEWHERE = "Make room or mend its rights, or set TANDEM_HOME to a folder elsewhere."


def write_problem(folder: Path, what: str) -> LocalError | None:
    """Why nothing could be written into a folder, which is made where it is not there; None: it could.

    `what` is what would be written, in words. Found out by writing: rights, quotas, read-only mounts and full
    disks differ in all but that.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())  # where a file system takes first and looks for room later
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else None
        told = f"{named}: {error.strerror}" if named and Path(named) in folder.parents else error.strerror
        return LocalError(f"Cannot write {what} into {folder}: {told}. {ELSEWHERE}")
    return None


def room_problem(folder: Path, needed: int, what: str) -> LocalError | None:
    """What to say where the disk of a folder, which is there, has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return LocalError(
        f"There is no room for {what} in {folder}: it takes {needed / 1e6:,.0f} MB, and the disk has "
        f"{free / 1e6:,.0f} MB left. {ELSEWHERE}"
    )


def require_private(folder: Path, what: str) -> None:
    """Look at a folder in a place such as /tmp, where anybody could have made it; `what` is in it, in words.

    Raises LocalError where it is not this user's alone, or no folder (a link leads to others' files), and
    FileNotFoundError where there is nothing."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LocalError(
            f"{folder} is not a folder of this user alone, as one for {what} must be. Remove it, or set "
            "TMPDIR to another folder."
        )
