"""The command `tandem`: one small module for each subcommand, imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

# Name → what it does. The module is tandem.cli.<name>, with add_arguments(parser) and run(arguments) -> int.
COMMANDS = {
    "demo": "prove on this machine, or on a running endpoint, that disaggregation works",
    "up": "run an endpoint on this machine",
    "router": "run the router alone",
}

OK, FAILURE, USAGE, ENVIRONMENT = 0, 1, 2, 3
"""Exit codes: done; it ran and failed; the command or the resource is wrong; this machine lacks something."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tandem", description="Disaggregated prefill and decode for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"tandem {version('tandem-dpd')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((w for w in words if not w.startswith("-")), None)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        if name == named:
            module = importlib.import_module(f"tandem.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    return code


def complain(message: object) -> None:
    """Say on stderr why a command ends."""
    print(f"tandem: {message}", file=sys.stderr)
