"""vLLM's command line: what counts, what is ignored, what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tandem.api import parse_endpoint
from tandem.engine import EnginePorts, Machine, plan
from tandem.engine.kv_transfer import Accelerator
from tandem.engine.machine import Core
from tandem.sim import flags
from tandem.sim.args import UsageError, parse
from tandem.sim.build import KINDS


def test_flags_that_count_have_their_effect() -> None:
    words = """--model /m --served-model-name a b --max_model_len 8k --block-size=32
    --no-enable-prefix-caching
    --max-num-batched-tokens 4K --max-num-seqs 7 -tp 2 --port 8001 --no-enable-chunked-prefill"""
    args = parse(words.split())
    assert args.served_names == ("a", "b")
    assert (args.max_model_len, args.max_num_batched_tokens, args.max_num_seqs) == (8000, 4096, 7)
    assert (args.block_size, args.tensor_parallel, args.port) == (32, 2, 8001)
    assert (args.prefix_caching, args.chunked_prefill) == (False, False)


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "serve", "/m", "--port", "1"],
        ["/opt/bin/vllm", "serve", "/m", "--port", "1"],
        ["serve", "/m", "--port", "1"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m", "--port", "1"],
        ["/m", "--port=1"],
    ],
)
def test_a_whole_command_is_taken(command: list[str]) -> None:
    args = parse(command)
    assert (args.model, args.port) == ("/m", 1)


def test_the_hand_off_is_read_from_json_and_from_dotted_keys() -> None:
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 12},
    }
    dotted = [
        "--kv-transfer-config.kv_connector",
        "NixlConnector",
        "--kv-transfer-config.kv_role",
        "kv_producer",
    ]
    transfer = parse(["--kv-transfer-config", json.dumps(config)]).kv_transfer
    assert transfer is not None
    assert (transfer.connector, transfer.role, transfer.recompute) == ("NixlConnector", "kv_producer", True)
    assert transfer.extra == {"kv_lease_duration": 12}
    other = parse(dotted).kv_transfer
    assert other is not None
    assert (other.connector, other.role) == ("NixlConnector", "kv_producer")


def test_of_several_connectors_the_one_that_hands_over_counts() -> None:
    inner = [{"kv_connector": "LMCacheMPConnector"}, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}]
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}}
    transfer = parse(["--kv-transfer-config", json.dumps(config)]).kv_transfer
    assert transfer is not None
    assert transfer.connector == "NixlConnector"


def test_flags_without_meaning_here_are_listed() -> None:
    assert parse(["--enforce-eager", "--gpu-memory-utilization", "0.9"]).ignored == (
        "--enforce-eager",
        "--gpu-memory-utilization",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-modle-len", "8", "--port", "1"], "unrecognized arguments: --max-modle-len"),
        (["--max-model", "8"], "--max-model"),
        (["--port", "x"], "--port"),
        (["--max-model-len", "much"], "max-model-len"),
        (["--kv-transfer-config", "[]"], "not a JSON object"),
        (["--kv-transfer-config", '{"kv_role":"kv_both"}'], "kv_connector is missing"),
        (["--kv-events-config", '{"enable_kv_cache_events":"yes"}'], "kv-events-config"),
    ],
)
def test_what_vllm_would_refuse_is_named(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(words)


MANIFEST = """
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: e, namespace: default}
spec:
  modelName: m
  instanceType: ml.g5.xlarge
  modelSourceConfig: {modelSourceType: s3, modelLocation: m, s3Storage: {bucketName: b, region: us-west-2}}
  worker:
    image: vllm/vllm-openai
    args: ["--max-model-len", "4096", "--tensor-parallel-size", "1", "--enforce-eager", "-q", "fp8"]
    resources: {requests: {cpu: "1"}}
    modelInvocationPort: {containerPort: 8081, name: http}
    modelVolumeMount: {name: model, mountPath: /opt/ml/model}
  pdSpec:
    routingThreshold: 64
    prefillSpec: {replicas: 1}
    decodingSpec: {replicas: 1, args: ["--max-num-seqs", "32"]}
"""


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_what_tandem_starts_engines_with_is_understood(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    endpoint, _ = parse_endpoint(MANIFEST, source="m.yaml")
    machine = Machine((Core((0,)), Core((1,))), ("0", "1"), 1 << 34, accelerator, "python")
    launches = plan(endpoint, machine, tmp_path, [EnginePorts(9000, 9100), EnginePorts(9001, 9101)]).engines
    prefill, decode = (parse(launch.argv) for launch in launches)
    assert (prefill.port, prefill.max_model_len, decode.max_num_seqs) == (9000, 4096, 32)
    assert prefill.kv_transfer is not None
    assert decode.kv_transfer is not None
    assert (prefill.kv_transfer.role, decode.kv_transfer.role) == ("kv_producer", "kv_consumer")
    assert {prefill.kv_transfer.connector, decode.kv_transfer.connector} <= KINDS.keys()
    assert prefill.prompt_tokens_details


def test_the_flags_are_those_of_the_installed_vllm(vllm_parser: argparse.ArgumentParser) -> None:
    kinds: dict[str, list[str]] = {"switch": [], "value": [], "list": [], "optional": []}
    for action in vllm_parser._actions:
        names = [n[2:] for n in action.option_strings if n.startswith("--") and not n.startswith("--no-")]
        switch = isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0
        counted = {"+": "list", "*": "list", "?": "optional"}
        kind = "switch" if switch else counted.get(str(action.nargs), "value")
        kinds[kind] += [n for n in names if n != "help"]
    known = {"switch": flags.SWITCHES, "value": flags.VALUES, "list": flags.LISTS, "optional": flags.OPTIONAL}
    for kind, flags_of_kind in known.items():
        assert sorted(flags_of_kind.split()) == sorted(n.replace("_", "-") for n in kinds[kind]), kind
