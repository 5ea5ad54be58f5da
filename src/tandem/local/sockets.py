"""Unix sockets on which the engines of a local endpoint publish their KV events.

Events carry users' prompts, token by token, so the sockets lie in a folder that only its owner can enter. It
is made when the endpoint starts and removed by whoever stops it: `tandem.local.reaper`, which outlives us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from tandem.config import Subscription
from tandem.local.errors import LocalError
from tandem.local.folders import require_private

_LONGEST = 107  # bytes: sockaddr_un has room for 108, of which the last is NUL


def socket_folder(first_port: int) -> Path:
    """The folder of an endpoint, by the first of its engines' ports; it need not be there.

    That port is claimed (`tandem.local.ports`), so no other endpoint of this user has the folder."""
    return Path(tempfile.gettempdir()) / f"tandem-kv-{os.getuid()}-{first_port}"


def event_sockets(folder: Path, port: int) -> Subscription:
    """Where the engine of an HTTP port publishes. Raises LocalError where sockets cannot have such paths."""
    events, replay = str(folder / f"{port}.events"), str(folder / f"{port}.replay")
    if len(os.fsencode(replay)) > _LONGEST:
        raise LocalError(
            f"{replay} is too long for a socket, which KV events need: a path may have {_LONGEST} bytes. "
            "Set TMPDIR to a shorter folder."
        )
    if not replay.isprintable() or "," in replay:
        raise LocalError(f"{folder} cannot hold sockets for KV events; set TMPDIR to a plain folder.")
    return Subscription(f"ipc://{events}", f"ipc://{replay}")


def make_private(folder: Path) -> None:
    """Make a folder anew, empty and for this user alone. Raises LocalError.

    What a killed endpoint of this user left there goes; what anybody else can write to is not touched."""
    try:
        with contextlib.suppress(FileNotFoundError):
            require_private(folder, "sockets for KV events")
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise LocalError(f"Cannot make {folder}, for sockets: {error.strerror}") from None
