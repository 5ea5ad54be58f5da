"""`tandem router`: the data plane as a process."""

from __future__ import annotations

import argparse

from tandem.cli import ENVIRONMENT, OK, USAGE, complain
from tandem.config import add_router_arguments, router_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_router_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = router_config(arguments)
    except ValueError as error:
        complain(error)
        return USAGE
    from tandem.router import app

    try:
        app.run(config)
    except (OSError, ValueError) as error:
        complain(error)
        return ENVIRONMENT
    return OK
