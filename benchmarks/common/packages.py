"""The peers' packages: they live in an environment of their own, .venv-peers, made from peers.txt."""

from __future__ import annotations

import hashlib
import subprocess
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = HERE.parents[1] / ".venv-peers"
PACKAGES = HERE / "peers.txt"


def python() -> Path:
    """The peers' Python; the first call installs them (20 s, 0.5 GB)."""
    found, stamp = program("python"), VENV / "installed"
    wanted = hashlib.sha256(PACKAGES.read_bytes()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == wanted):
        venv.create(VENV, clear=True, with_pip=True)
        command = [found, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", PACKAGES]
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return found


def program(name: str) -> Path:
    """A program of theirs."""
    return VENV / "bin" / name
