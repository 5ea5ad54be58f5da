"""What the index takes at the size it is meant for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "routing" / "index.py"


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["8", "256"])
def test_two_million_blocks_fit_in_450_mb(engines: str) -> None:
    """In a process of its own: resident memory is never given back entirely."""
    command = [sys.executable, str(BENCHMARK), "--part", "memory", engines]
    measured = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert measured["blocks"] == 2_000_000
    assert measured["mb"] <= 450
