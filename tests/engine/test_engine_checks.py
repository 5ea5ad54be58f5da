"""What validation says of flags is what vLLM's own parser does."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tandem.engine.flag_checks import Flags, flag_findings
from tandem.engine.roles import Source
from tandem.engine.validation import validate

Takes = Callable[[list[str]], bool]


@pytest.fixture(scope="session")
def vllm_takes(vllm_parser: Any) -> Takes:
    """Whether vLLM's parser takes a command line."""

    def takes(args: list[str]) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                vllm_parser.parse_args(args)
            except (SystemExit, ValueError):
                return False
        return True

    return takes


def found(*args: str) -> list[str]:
    flags = Flags.of([(Source("spec.worker.args", args), 0)], "spec.worker.resources")
    return [rule for rule, _, _ in flag_findings(flags)]


NEVER_TAKEN = [
    (["--tensor-parallel-size", "eight"], "IEC401"),
    (["--tensor-parallel-size=8k"], "IEC401"),
    (["-tp", "1.5"], "IEC401"),
    (["--max-num-seqs", ""], "IEC402"),
    (["--max-num-seqs"], "IEC402"),
    (["--block-size", "sixteen"], "IEC401"),
    (["--max-model-len", "long"], "IEC401"),
    (["--max-model-len", "1.5K"], "IEC401"),
    (["--max-num-batched-tokens", "auto"], "IEC401"),
    (["--gpu-memory-utilization", "90%"], "IEC401"),
    (["--dtype", "fp16"], "IEC401"),
    (["--speculative-config", "{"], "IEC401"),
]


@pytest.mark.parametrize(("args", "rule"), NEVER_TAKEN, ids=str)
def test_what_is_called_wrong_vllm_refuses(vllm_takes: Takes, args: list[str], rule: str) -> None:
    assert found(*args) == [rule]
    assert not vllm_takes(args)


@pytest.mark.parametrize("args", [["--max-model-len 4096"], ["--port 8001", "--enforce-eager"]], ids=str)
def test_flag_and_value_in_one_item_are_no_flag_to_vllm(vllm_parser: Any, args: list[str]) -> None:
    """Its parser takes the item for the name of the model."""
    assert found(*args) == ["IEC403"]
    parsed = vllm_parser.parse_args(args)
    assert (parsed.max_model_len, parsed.port) == (None, 8000)


TAKEN = [
    ["--tensor-parallel-size", "8"],
    ["-tp=8"],
    ["--max-num-seqs", "+8"],
    ["--max-model-len", "8k"],
    ["--max-model-len=16K"],
    ["--max-model-len", "auto"],
    ["--max-model-len", "-1"],
    ["--max-num-batched-tokens", "1.5k"],
    ["--gpu-memory-utilization", "1"],
    ["--gpu_memory_utilization=.9"],
    ["--dtype", "half"],
    ["--speculative-config", '{"method": "ngram"}'],
    ["--kv-events-config.publisher", "zmq"],
    ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
    ["--served-model-name", "a b", "c"],
    ["--no-enable-chunked-prefill"],
]


@pytest.mark.parametrize("args", TAKEN, ids=str)
def test_what_vllm_takes_is_not_called_wrong(vllm_takes: Takes, args: list[str]) -> None:
    assert vllm_takes(args)
    assert found(*args) == []


# What the parser takes, and the engine refuses when it starts.
@pytest.mark.parametrize(
    "args",
    [
        ["--tensor-parallel-size", "0"],
        ["--gpu-memory-utilization", "90"],
        ["--gpu-memory-utilization", "nan"],
        ["--max-num-batched-tokens", "0"],
        ["--max-num-seqs", "-1"],
    ],
    ids=str,
)
def test_numbers_out_of_range_are_told(args: list[str]) -> None:
    assert found(*args) == ["IEC401"]


def test_the_last_of_several_settings_counts() -> None:
    assert found("--max-num-seqs", "x", "--max-num-seqs", "8") == []


KVAWARE = {
    "intelligentRoutingSpec": {"routingStrategy": "kvaware"},
    "invocationEndpoint": "v1/completions",
}
LMCACHE = "lmcache/vllm-openai:v0.4.3"
RESOURCE: dict[str, Any] = {
    "apiVersion": "inference.sagemaker.aws.amazon.com/v1",
    "kind": "InferenceEndpointConfig",
    "metadata": {"name": "pd"},
    "spec": {
        "modelName": "m",
        "instanceType": "ml.p5.48xlarge",
        "modelSourceConfig": {"modelSourceType": "s3", "s3Storage": {"bucketName": "b", "region": "r"}},
        "worker": {
            "image": "vllm/vllm-openai:v0.19.0",
            "modelInvocationPort": {"containerPort": 8000},
            "modelVolumeMount": {"name": "weights"},
            "resources": {},
        },
    },
}
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}


def judged(
    *, pd: dict[str, Any] | None = None, spec: dict[str, Any] | None = None, **worker: Any
) -> list[tuple[str, str]]:
    """What is said of an endpoint with these fields of `spec.pdSpec` (a pair), `spec` and `spec.worker`."""
    pair = {"prefillSpec": dict(GPU), "decodingSpec": dict(GPU)}
    for name, value in (pd or {}).items():
        pair[name] = pair.get(name, {}) | value if isinstance(value, dict) else value
    whole = (
        RESOURCE["spec"] | {"pdSpec": pair} | (spec or {}) | {"worker": RESOURCE["spec"]["worker"] | worker}
    )
    return [(f.rule, f.path) for f in validate(RESOURCE | {"spec": whole}).findings]


def test_a_plain_pair_is_fine() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        # A role's flag is told in the role, a shared one in worker.args.
        ({"pd": {"decodingSpec": {"args": ["--port=9"]}}}, [("IEC407", "spec.pdSpec.decodingSpec.args[0]")]),
        ({"args": ["vllm", "serve", "/opt/ml/model", "--port", "9"]}, [("IEC407", "spec.worker.args[3]")]),
        ({"command": ["vllm", "serve", "/opt/ml/model", "-tp=x"]}, [("IEC401", "spec.worker.command[3]")]),
        # A role's own flag replaces a bad one: for the other role it stays bad.
        (
            {
                "args": ["--max-num-seqs", "x"],
                "pd": {
                    "prefillSpec": {"args": ["--max-num-seqs=4"]},
                    "decodingSpec": {"args": ["--max_num_seqs=4"]},
                },
            },
            [],
        ),
        ({"args": ["--model", "/opt/ml/model/sub"]}, []),
        ({"args": ["--model", "org/name"]}, []),
        ({"args": ["--model", "/opt/ml/models"]}, [("IEC713", "spec.worker.args[0]")]),
        ({"args": ["--host", "0.0.0.0", "--seed", "$$(X)"]}, []),
        ({"args": ["--uds", "/tmp/s"]}, [("IEC408", "spec.worker.args[0]")]),
        ({"spec": {"pdSpec": None}, "args": ["--uds", "/tmp/s", "--model=m"]}, []),
        # The buffer is LMCache's, and tells that it is there; where flags name NIXL it may be anything.
        (
            {"environmentVariables": [{"name": "PD_BUFFER_SIZE", "value": "8Gi"}]},
            [("IEC232", "spec.worker.environmentVariables[0]")],
        ),
        (
            {
                "environmentVariables": [{"name": "PD_BUFFER_SIZE", "value": "8Gi"}],
                "args": ["--kv-transfer-config", '{"kv_connector":"NixlConnector"}'],
            },
            [("IEC519", "spec.worker.args[0]"), ("IEC518", "spec.worker.environmentVariables[0]")],
        ),
        # GPUs: two data-parallel ranks of one GPU each
        ({"args": ["-dp", "2"]}, [("IEC405", "spec.worker.args[0]")] * 2),
        ({"args": ["-dp", "2", "-dpl", "1"]}, []),
        # What must be the same, and what need not
        (
            {"pd": {"decodingSpec": {"args": ["--dtype", "half"]}}},
            [("IEC406", "spec.pdSpec.decodingSpec.args[0]")],
        ),
        ({"pd": {"decodingSpec": {"args": ["--max-num-seqs", "32"]}}}, []),
        ({"pd": {"routingThreshold": 4095}, "args": ["--max-model-len", "4096"]}, []),
        (
            {"pd": {"routingThreshold": 4096}, "args": ["--max-model-len", "4096"]},
            [("IEC706", "spec.pdSpec.routingThreshold")],
        ),
        # With NIXL more than one router is fine; random hash seeds are too.
        ({"spec": {"intelligentRoutingSpec": {"autoScalingSpec": {}}}}, []),
        ({"environmentVariables": [{"name": "PYTHONHASHSEED", "value": "random"}]}, []),
        (
            {"environmentVariables": [{"name": "PYTHONHASHSEED", "value": "random"}], "image": LMCACHE},
            [("IEC406", "spec.worker.environmentVariables[0].value")],
        ),
        ({"environmentVariables": [{"name": "PYTHONHASHSEED"}]}, []),
        (
            {"environmentVariables": [{"name": "PYTHONHASHSEED"}], "image": LMCACHE},
            [("IEC406", "spec.worker.environmentVariables[0].value")],
        ),
        ({"environmentVariables": [{"name": "PYTHONHASHSEED", "value": "$(X)"}], "image": LMCACHE}, []),
        ({"image": LMCACHE, "args": ["-dp", "2", "-dpl", "1"]}, [("IEC406", "spec.worker.args[0]")]),
        # LMCache's decoders have no prefix cache; prefillers may
        (
            {"image": LMCACHE, "pd": {"decodingSpec": {"args": ["--enable-prefix-caching"]}}},
            [("IEC519", "spec.pdSpec.decodingSpec.args[0]")],
        ),
        ({"image": LMCACHE, "pd": {"prefillSpec": {"args": ["--enable-prefix-caching"]}}}, []),
        ({"image": LMCACHE, "pd": {"decodingSpec": {"args": ["--no-enable-prefix-caching"]}}}, []),
        ({"pd": {"decodingSpec": {"args": ["--enable-prefix-caching"]}}}, []),
        # KV events
        (
            {"spec": KVAWARE, "args": ["--kv-events-config.endpoint", "tcp://*:1"]},
            [("IEC519", "spec.worker.args[0]")],
        ),
        ({"args": ["--kv-events-config.endpoint", "tcp://*:1"]}, []),
        (
            {"spec": KVAWARE, "args": ["-dp", "44", "-dpl", "1"]},
            [("IEC404", "spec.worker.args[0]")],
        ),
        (
            {"spec": KVAWARE, "modelInvocationPort": {"containerPort": 5557}},
            [("IEC229", "spec.worker.modelInvocationPort.containerPort")],
        ),
        # A strategy that does not look at caches
        (
            {
                "spec": {"intelligentRoutingSpec": {"routingStrategy": "roundrobin"}},
                "args": ["--no-enable-prefix-caching"],
            },
            [],
        ),
        # A colocated endpoint
        (
            {"spec": {"pdSpec": None}, "args": ["--port", "9", "--model=m"]},
            [("IEC407", "spec.worker.args[0]")],
        ),
        (
            {"spec": {"pdSpec": None}, "args": ["-tp", "4", "--model=m"], **GPU},
            [("IEC405", "spec.worker.args[0]")],
        ),
        ({"spec": {"pdSpec": None}, "args": ["-tp", "1"]}, [("IEC725", "spec.worker.args")]),
    ],
)
def test_engines_are_judged(fields: dict[str, Any], said: list[tuple[str, str]]) -> None:
    assert judged(**fields) == said


SEED = "metadata.annotations[tandem.dev/decode-env][0].value"


@pytest.mark.parametrize(
    ("value", "image", "said"),
    [
        ("7", LMCACHE, [("IEC406", SEED)]),
        ("0", LMCACHE, []),
        ("00", LMCACHE, []),
        ("random", LMCACHE, [("IEC406", SEED)]),
        ("seven", LMCACHE, [("IEC232", SEED)]),
        ("seven", "vllm/vllm-openai:v0.19.0", [("IEC232", SEED)]),
        ("7", "vllm/vllm-openai:v0.19.0", []),
    ],
)
def test_a_role_that_seeds_hashes_otherwise_finds_no_kv_of_lmcaches(
    value: str, image: str, said: list[tuple[str, str]]
) -> None:
    """The other role has what Tandem sets, 0."""
    own = f'[{{"name": "PYTHONHASHSEED", "value": "{value}"}}]'
    resource = copy.deepcopy(RESOURCE)
    resource["metadata"]["annotations"] = {"tandem.dev/decode-env": own}
    resource["spec"]["worker"]["image"] = image
    resource["spec"]["pdSpec"] = {"prefillSpec": GPU, "decodingSpec": GPU}
    assert [(f.rule, f.path) for f in validate(resource).findings] == said


@pytest.mark.parametrize(
    ("setting", "value", "issue"),
    [
        ("use_layerwise", "True", "#1174"),
        ("use_layerwise", "1", "#1174"),
        ("use_layerwise", "false", None),
        ("pd_backend_mode", "async", "#2847"),
        ("pd_backend_mode", "'async'", "#2847"),
        ("pd_backend_mode", "sync", None),
    ],
)
def test_a_mode_in_which_lmcache_hands_over_garbage_is_refused_with_the_reason(
    setting: str, value: str, issue: str | None
) -> None:
    variable = {"name": f"LMCACHE_{setting.upper()}", "value": value}
    transfer = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_extra_config": {f"lmcache.{setting}": value},
    }
    flags = ["--kv-transfer-config", json.dumps(transfer)]
    own = {"tandem.dev/prefill-env": json.dumps([variable])}
    for path, noted, worker in (
        ("spec.worker.environmentVariables[0].value", {}, {"environmentVariables": [variable]}),
        ("metadata.annotations[tandem.dev/prefill-env][0].value", own, {"image": LMCACHE}),
        ("spec.worker.args[0]", {}, {"args": flags}),
    ):
        resource = copy.deepcopy(RESOURCE)
        resource["metadata"]["annotations"] = noted
        resource["spec"]["worker"] |= worker
        resource["spec"]["pdSpec"] = {"prefillSpec": GPU, "decodingSpec": GPU}
        errors = validate(resource).errors
        assert [(e.rule, e.path) for e in errors] == ([("IEC409", path)] if issue else [])
        assert all(f"LMCache {issue}" in e.message for e in errors)
        resource["metadata"]["annotations"] = {**noted, "tandem.dev/connector": "nixl"}
        assert validate(resource).errors == (), "over NIXL it says nothing"


def test_without_a_hand_off_layers_may_go_one_by_one() -> None:
    layerwise = [{"name": "LMCACHE_USE_LAYERWISE", "value": "true"}]
    assert judged(spec={"pdSpec": None}, args=["--model=m"], environmentVariables=layerwise) == []


@pytest.mark.parametrize(
    "value",
    ["0", "007", " 7", "+7", "00000000007", "4294967295", "", "random", "4294967296", "-1", "7 ", "7.0", "x"],
)
def test_the_seeds_that_are_called_wrong_python_does_not_start_with(value: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": value}
    done = subprocess.run([sys.executable, "-S", "-c", ""], env=env, capture_output=True, check=False)
    variables = [{"name": "PYTHONHASHSEED", "value": value}]
    told = judged(environmentVariables=variables) == [("IEC232", "spec.worker.environmentVariables[0].value")]
    assert told is (done.returncode != 0)


def test_flags_are_not_misread_where_the_list_is_no_list_of_strings() -> None:
    numbers = judged(args=["--port", 9])
    assert numbers == [("IEC103", "spec.worker.args[1]"), ("IEC407", "spec.worker.args[0]")]
    assert judged(args=["--port", [9]]) == [("IEC103", "spec.worker.args[1]")]
    assert {rule for rule, _ in judged(pd={"prefillSpec": {"args": "--port 9"}})} == {"IEC103"}


def test_arguments_and_variables_beyond_what_a_program_is_started_with_are_told_and_not_read() -> None:
    """Each is short enough; all together they are beyond all memory."""
    long = [{"name": "A", "value": "x" * 10_000}, {"name": "B", "value": "$(A)" * 12}]
    assert judged(environmentVariables=long, args=["--a=$(B)"] * 17) == []
    many = judged(environmentVariables=long, args=["--a=$(B)"] * 900)
    assert set(many) == {("IEC404", "spec.worker.args[17]")}
    many = judged(environmentVariables=[*long, *({"name": f"C{i}", "value": "$(B)"} for i in range(900))])
    assert set(many) == {("IEC232", "spec.worker.environmentVariables[18].value")}
