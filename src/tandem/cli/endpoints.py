"""What `tandem status`, `logs` and `down` share: which endpoints of this user are meant."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tandem.cli import ENVIRONMENT, complain
from tandem.cli.flags import port

if TYPE_CHECKING:
    from tandem.local.record import Found


def add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the endpoint, as its manifest has it"
    )
    parser.add_argument("--port", type=port, help="port of its router")


def none_found(name: str | None, port: int | None, *, running: bool) -> int:
    """Say that there is no such endpoint; returns the exit code for it."""
    which = f"endpoint {name}" if name else "endpoint"
    where = f" on port {port}" if port else ""
    complain(
        f"No {which}{where} {'runs' if running else 'has run'} on this machine. "
        "`tandem status` lists those of this user; start one with `tandem up`."
    )
    return ENVIRONMENT


def list_of(found: list[Found]) -> str:
    return "; ".join(f"{each.state.name} --port {each.state.port}" for each in found)
