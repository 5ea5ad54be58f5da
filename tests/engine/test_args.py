"""Flags of a role laid over those of the worker, by vLLM's own rules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engine.args import (
    ALIASES,
    POSITIONALS,
    flag_value,
    flag_values,
    has_flag,
    int_value,
    merge_args,
    switch,
    without,
)

Parse = Callable[[Sequence[str]], argparse.Namespace]

# How the same setting can be written: (flag's own name, spellings of one value each).
SPELLINGS: dict[str, list[list[str]]] = {
    "--max-num-seqs": [
        ["--max-num-seqs", "4"],
        ["--max-num-seqs=8"],
        ["--max_num_seqs", "16"],
        ["--max_num_seqs=2"],
    ],
    "--tensor-parallel-size": [["-tp", "2"], ["--tensor-parallel-size", "4"], ["-tp=8"]],
    "--pipeline-parallel-size": [["-pp", "2"], ["--pipeline_parallel_size=3"]],
    "--gpu-memory-utilization": [
        ["--gpu-memory-utilization", "0.5"],
        ["--device-memory-utilization", "0.75"],
    ],
    "--enforce-eager": [["--enforce-eager"], ["--no-enforce-eager"], ["--no_enforce_eager"]],
    "--enable-prefix-caching": [["--enable-prefix-caching"], ["--no-enable-prefix-caching"]],
    "--enable-expert-parallel": [["-ep"], ["--no-enable-expert-parallel"]],
    "--served-model-name": [["--served-model-name", "a", "b"], ["--served-model-name", "c"]],
    "--max-model-len": [["--max-model-len", "-1"], ["--max-model-len", "8k"], ["--max-model-len=4096"]],
    "--middleware": [["--middleware", "a.b"], ["--middleware", "c.d"]],
    "--optimization-level": [["-O3"], ["-O", "1"], ["-O=2"], ["--optimization-level", "0"]],
    "--kv-events-config": [
        ["--kv-events-config", '{"publisher":"zmq","topic":"a -b","hwm":-1}'],
        ['--kv-events-config={"publisher":"null"}'],
        ["--kv-events-config.publisher", "zmq", "--kv-events-config.hwm=-7"],
    ],
}

one_setting = st.sampled_from([spelling for spellings in SPELLINGS.values() for spelling in spellings])
flags_once = st.lists(st.sampled_from(sorted(SPELLINGS)), unique=True, max_size=6).flatmap(
    lambda names: st.tuples(*(st.sampled_from(SPELLINGS[name]) for name in names))
)
command_lines = flags_once.map(lambda chosen: [token for tokens in chosen for token in tokens])
property_test = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize(
    ("worker", "role", "merged"),
    [
        ("--max-num-seqs 8 --dtype auto", "--max-num-seqs 16", "--max-num-seqs 16 --dtype auto"),
        ("--max-num-seqs=8 --dtype auto", "--max_num_seqs 16", "--max_num_seqs 16 --dtype auto"),
        ("--enforce-eager --seed 1", "--no-enforce-eager", "--no-enforce-eager --seed 1"),
        ("--seed 1", "--enforce-eager", "--seed 1 --enforce-eager"),
        ("-tp 8 --seed 1", "--tensor-parallel-size 4", "--tensor-parallel-size 4 --seed 1"),
        ("--served-model-name a b --seed 1", "--served-model-name c", "--served-model-name c --seed 1"),
        ("--seed -1 --dtype auto", "--dtype half", "--seed -1 --dtype half"),
        ("-O3 --seed 1", "--optimization-level 0", "--optimization-level 0 --seed 1"),
        ("--seed 1 --seed 2 --dtype auto", "--seed 3", "--seed 3 --dtype auto"),
        ("MODEL --seed 1", "--seed 2", "MODEL --seed 2"),
        ("MODEL --seed 1", "OTHER", "OTHER --seed 1"),
        ("--seed 1", "MODEL", "MODEL --seed 1"),
        (
            "--kv-transfer-config {} --seed 1",
            "--kv-transfer-config.kv_role x",
            "--kv-transfer-config.kv_role x --seed 1",
        ),
        ("--a.x 1 --a.y 2", "--a.x 3", "--a.y 2 --a.x 3"),
        ("--a.x.p 1 --a.x.q 2 --a.y 3", '--a.x {"p":9}', '--a.y 3 --a.x {"p":9}'),
        ("--a.x 1 --seed 1", '--a {"y":2}', '--a {"y":2} --seed 1'),
    ],
)
def test_the_roles_flag_takes_the_place_of_the_workers(worker: str, role: str, merged: str) -> None:
    assert merge_args(worker.split(), role.split()) == merged.split()


@property_test
@given(command_lines)
def test_an_empty_list_on_either_side_changes_nothing(args: list[str]) -> None:
    assert merge_args(args, []) == args
    assert merge_args([], args) == args
    assert merge_args(args, args) == args


@property_test
@given(command_lines, command_lines)
def test_flags_that_the_role_does_not_set_stay_as_they_were_and_in_order(
    worker: list[str], role: list[str]
) -> None:
    set_by_role = [name for name in SPELLINGS if has_flag(role, name)]
    assert without(merge_args(worker, role), set_by_role) == without(worker, set_by_role)


@property_test
@given(command_lines, command_lines)
def test_vllm_reads_the_merged_list_as_the_worker_overridden_by_the_role(
    vllm_parse: Parse, worker: list[str], role: list[str]
) -> None:
    expected = vars(vllm_parse(worker)) | _set_by(vllm_parse, role)
    assert vars(vllm_parse(merge_args(worker, role))) == expected


@property_test
@given(st.lists(one_setting, max_size=5), st.lists(one_setting, max_size=5))
def test_with_repeated_flags_the_roles_value_still_survives(
    vllm_parse: Parse, worker: list[list[str]], role: list[list[str]]
) -> None:
    worker_args, role_args = ([token for tokens in side for token in tokens] for side in (worker, role))
    merged = vars(vllm_parse(merge_args(worker_args, role_args)))
    for name, value in _set_by(vllm_parse, role_args).items():
        assert merged[name] == value


def test_dotted_keys_are_merged_as_vllm_merges_them(vllm_parse: Parse) -> None:
    worker = ["--kv-events-config.publisher", "zmq", "--kv-events-config.topic", "worker"]
    role = ["--kv-events-config.topic", "role"]
    assert vllm_parse(merge_args(worker, role)).kv_events_config.publisher == "zmq"
    assert vllm_parse(merge_args(worker, role)) == vllm_parse([*worker, *role])


def test_every_other_spelling_that_vllm_knows_is_in_the_table(vllm_parser: Any) -> None:
    theirs = {}
    for action in vllm_parser._actions:
        if action.option_strings:
            own, *others = (o for o in action.option_strings if not o.startswith("--no-"))
            theirs |= dict.fromkeys(others, own)
    # argparse lists a short name before or after the long one
    assert {frozenset(pair) for pair in theirs.items()} == {frozenset(pair) for pair in ALIASES.items()}


def test_no_vllm_flag_that_starts_with_no_is_anything_but_a_negation(vllm_parser: Any) -> None:
    names = {o for action in vllm_parser._actions for o in action.option_strings}
    assert all("--" + name.removeprefix("--no-") in names for name in names if name.startswith("--no-"))


@pytest.mark.parametrize("value", ["8192", "8k", "8K", "1.5k", "2m"])
def test_numbers_are_read_as_vllm_reads_them(vllm_parse: Parse, value: str) -> None:
    args = ["--max-model-len", value]
    assert int_value(args, "--max-model-len") == vllm_parse(args).max_model_len


@pytest.mark.parametrize("args", [[], ["--max-model-len", "auto"], ["--max-model-len", "-1"]])
def test_no_number_leaves_the_choice_to_vllm(args: list[str]) -> None:
    assert int_value(args, "--max-model-len") is None


@pytest.mark.parametrize("value", ["many", "1.5", "1.5K", ""])
def test_what_is_not_a_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="--max-model-len"):
        int_value([f"--max-model-len={value}"], "--max-model-len")


def test_readers_see_every_spelling_and_take_the_last() -> None:
    args = [
        "MODEL",
        "--max_model_len=1",
        "--max-model-len",
        "2",
        "--served-model-name",
        "a",
        "b",
        "-ep",
        "--no-x",
    ]
    assert flag_value(args, "--max-model-len") == "2"
    assert flag_values(args, "--served_model_name") == ("a", "b")
    assert flag_values(args, "--enable-expert-parallel") == ()
    assert flag_value(args, "--enable-expert-parallel") is None
    assert flag_value(args, POSITIONALS) == "MODEL"
    assert flag_values(args, "--port") is None
    assert switch(args, "--x") is False
    assert switch(args, "-ep") is True
    assert switch(args, "--port") is None
    assert has_flag(["--a.b", "1"], "--a")


def test_without_takes_out_every_spelling_with_its_values() -> None:
    args = [
        "--port",
        "1",
        "--host=h",
        "--served-model-name",
        "a",
        "b",
        "--no-port",
        "-tp",
        "2",
        "--port.x",
        "3",
    ]
    assert without(args, ["--port", "--tensor-parallel-size", "--served-model-name"]) == ["--host=h"]


def _set_by(parse: Parse, args: Sequence[str]) -> dict[str, Any]:
    """The values that a command line sets, as vLLM reads them."""
    return {k: v for k, v in vars(parse(args)).items() if has_flag(args, f"--{k}")}
