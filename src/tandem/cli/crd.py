"""`tandem crd`: the CustomResourceDefinition, for `kubectl apply -f -`."""

from __future__ import annotations

import argparse
import sys

from tandem.cli import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(arguments: argparse.Namespace) -> int:
    import yaml

    from tandem.api.crd import crd

    yaml.safe_dump(crd(), sys.stdout, sort_keys=False, allow_unicode=True, width=120)
    return OK
