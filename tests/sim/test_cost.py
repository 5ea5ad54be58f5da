"""The cost model: its formula, and profiles as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.sim.cost import CostProfile, ProfileError, load


def test_the_default_profile_has_the_figures_it_was_made_from() -> None:
    profile = CostProfile()
    assert 1500 / profile.step_seconds([(1500, 0)], []) == pytest.approx(520, rel=0.05)
    alone, four = profile.step_seconds([], [100]), profile.step_seconds([], [100] * 4)
    assert 1 / alone == pytest.approx(26, rel=0.1)
    assert four < alone * 1.1
    assert profile.transfer_seconds(38_300_000) == pytest.approx(0.016, rel=0.2)


def test_a_chunk_in_the_step_delays_every_stream_in_it() -> None:
    profile = CostProfile()
    streams = [200, 300]
    together = profile.step_seconds([(512, 0)], streams)
    assert together > profile.step_seconds([], streams) + 512 * profile.prefill_token


def test_chunks_of_a_prompt_cost_what_the_prompt_costs_and_a_step_each() -> None:
    profile = CostProfile()
    whole = profile.step_seconds([(1000, 0)], [])
    cut = profile.step_seconds([(400, 0)], []) + profile.step_seconds([(600, 400)], [])
    assert cut - whole == pytest.approx(profile.step)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = CostProfile(name="x", step=0.5, block_size=16)
    (tmp_path / "p.json").write_bytes(profile.to_json())
    assert load(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ("[]", "not a JSON object"),
        ('{"stpe": 1}', "unknown stpe"),
        ('{"step": "x"}', "step"),
        ('{"step": -1}', "step: is -1"),
        ('{"kv_bandwidth": 0}', "kv_bandwidth"),
        ('{"block_size": 0}', "at least 1"),
    ],
)
def test_a_profile_that_cannot_be_used_names_file_and_field(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=said) as error:
        load(tmp_path / "p.json")
    assert "p.json" in str(error.value)


def test_a_missing_profile_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load(tmp_path / "none.json")
