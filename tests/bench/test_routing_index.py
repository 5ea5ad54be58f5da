"""What `make bench-routing` says of the index: its parts run with the index as it is now."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

INDEX = Path(__file__).resolve().parents[2] / "benchmarks" / "routing" / "index.py"


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        (("chain", "2"), {"chain_us", "lookup_us"}),
        (("intake",), {"intake_blocks_per_s"}),
        (("choices", "2"), {"roundrobin", "session", "prefixaware", "kvaware", "leastloaded", "decoder"}),
    ],
)
def test_a_part_gives_its_figures(words: tuple[str, ...], figures: set[str]) -> None:
    ran = subprocess.run(
        [sys.executable, str(INDEX), "--part", *words], capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert found.keys() == figures
    assert all(value > 0 for value in found.values())
