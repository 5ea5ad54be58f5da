"""`tandem crd`: the CustomResourceDefinition, for `kubectl apply -f -`."""

from __future__ import annotations

import argparse

from tandem.cli import emit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(arguments: argparse.Namespace) -> int:
    import yaml

    from tandem.api.crd import crd

    return emit(yaml.safe_dump(crd(), sort_keys=False, allow_unicode=True, width=120))
