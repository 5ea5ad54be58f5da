"""vLLM's own parser, for the tests that hold Tandem's command lines to it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm_parser() -> Any:
    """The parser of vLLM's API server; building it imports vLLM, which takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launchers = pytest.importorskip(
            "vllm.entrypoints.launchers.cli_args", reason="needs vLLM's CPU build: run `make setup`"
        )
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return launchers.make_arg_parser(FlexibleArgumentParser())


@pytest.fixture(scope="session")
def vllm_parse(vllm_parser: Any) -> Callable[[Sequence[str]], argparse.Namespace]:
    """Parse the flags of an engine as vLLM would; a flag it does not take fails the test."""

    def parse(args: Sequence[str]) -> argparse.Namespace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                namespace: argparse.Namespace = vllm_parser.parse_args(list(args))
            except SystemExit:
                pytest.fail(f"vLLM refuses {' '.join(args)}")
        return namespace

    return parse


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory as far as planning reads it: a context of 8192 tokens."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    return tmp_path
