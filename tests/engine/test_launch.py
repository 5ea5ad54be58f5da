"""What the engines of an endpoint are started with on one machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tandem.api import Endpoint, Role
from tandem.engine import (
    Core,
    EngineError,
    EngineLaunch,
    EnginePlan,
    EnginePorts,
    Machine,
    engine_count,
    flag_value,
    has_flag,
    max_model_len,
    plan,
    served_model_name,
    switch,
)

from .endpoints import MANIFESTS, endpoint, manifest

GIB = 1 << 30
CPU = Machine(
    cores=tuple(Core((i, i + 8)) for i in range(8)),
    gpus=(),
    memory_bytes=16 * GIB,
    accelerator="cpu",
    python="/venv/bin/python",
)
GPU = Machine(
    cores=CPU.cores,
    gpus=tuple(map(str, range(32))),
    memory_bytes=16 * GIB,
    accelerator="cuda",
    python="/venv/bin/python",
)
MACHINES = {"cpu": CPU, "gpu": GPU}
ENDPOINTS = {name: manifest(text) for name, text in MANIFESTS.items()} | {
    "2 prefillers, 2 decoders": endpoint(prefillers=2, decoders=2),
    "compiled, everything set": endpoint(
        ["serve", "org/model", "--no-enforce-eager", "--max-num-batched-tokens=512", "--max-model-len", "4k",
         "--kv-cache-memory-bytes", "1G", "--no-enable-prompt-tokens-details",
         "--distributed-executor-backend", "mp"],
        prefill_args=["--max_num_seqs", "8"],
    ),
    "no chunked prefill": endpoint(["--no-enable-chunked-prefill", "--max-model-len", "2048"]),
    "many sequences": endpoint(["--max-num-seqs", "1024"]),
    "model in the command": endpoint([], command=["vllm", "serve", "/opt/ml/model", "--seed", "1"]),
}  # fmt: skip


def planned(endpoint: Endpoint, machine: Machine, model: Path, **options: Any) -> EnginePlan:
    ports = [EnginePorts(http=8101 + i, side_channel=5601 + i) for i in range(engine_count(endpoint))]
    return plan(endpoint, machine, model, ports, **options)


def flags(engine: EngineLaunch) -> list[str]:
    assert engine.argv[:3] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    return list(engine.argv[3:])


def only(engines: Sequence[EngineLaunch], role: Role) -> EngineLaunch:
    [engine] = (e for e in engines if e.role is role)
    return engine


@pytest.mark.parametrize(("name", "machine"), list(product(ENDPOINTS, MACHINES)))
def test_vllm_takes_every_command_line(
    vllm_parse: Callable[[Sequence[str]], argparse.Namespace], model: Path, name: str, machine: str
) -> None:
    result = planned(ENDPOINTS[name], MACHINES[machine], model)
    for engine in result.engines:
        parsed = vllm_parse(flags(engine))
        assert parsed.model_tag is None
        assert parsed.model == str(model)
        assert (parsed.host, parsed.port) == (engine.host, engine.port)
        assert result.served_model_name in parsed.served_model_name
        transfer = parsed.kv_transfer_config
        assert transfer.kv_role == ("kv_producer" if engine.role is Role.PREFILL else "kv_consumer")
        if machine == "cpu":
            assert parsed.distributed_executor_backend == "uni"
            assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size) == (1, 1)
            assert parsed.kv_cache_memory_bytes > 0
            assert parsed.max_num_batched_tokens >= (parsed.max_num_seqs or 128)
            if parsed.enable_chunked_prefill is False:
                assert parsed.max_num_batched_tokens >= parsed.max_model_len


def test_engines_are_named_by_role_and_have_their_own_ports_and_cores(model: Path) -> None:
    engines = planned(endpoint(prefillers=2, decoders=2), CPU, model).engines
    assert [e.name for e in engines] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert [e.url for e in engines] == [f"http://127.0.0.1:{8101 + i}" for i in range(4)]
    assert [e.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for e in engines] == ["5601", "5602", "5603", "5604"]
    assert [e.cpus for e in engines] == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    assert {e.env["OMP_NUM_THREADS"] for e in engines} == {"2"}  # one thread per physical core


def test_cores_that_are_left_over_are_named(model: Path) -> None:
    assert planned(endpoint(prefillers=2), CPU, model).spare_cpus == (6, 7, 14, 15)
    assert planned(endpoint(), GPU, model).spare_cpus == ()


def test_more_engines_than_cores_are_noted(model: Path) -> None:
    assert any("engines share" in n for n in planned(endpoint(prefillers=8, decoders=8), CPU, model).notes)


def test_the_address_can_be_chosen(model: Path) -> None:
    engine = planned(endpoint(), CPU, model, host="::1").engines[0]
    assert engine.url == "http://[::1]:8101"
    assert engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "::1"


def test_what_tandem_replaces_is_noted_once_with_its_place_and_reason(model: Path) -> None:
    given = endpoint(
        ["--model", "/opt/ml/model", "--port=8000", "--host", "0.0.0.0", "--kv-transfer-config", '{"a":1}'],
        decode_args=["--port", "9000"],
        env=[
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "1"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
    )
    notes = planned(given, CPU, model).notes
    assert "--port=8000 of spec.worker.args: replaced by the port Tandem chose" in notes
    assert "--port 9000 of spec.pdSpec.decodingSpec.args: replaced by the port Tandem chose" in notes
    assert "--host 0.0.0.0 of spec.worker.args: replaced by the address Tandem chose" in notes
    assert (
        f"--model /opt/ml/model of spec.worker.args: replaced by the model on this machine, {model}" in notes
    )
    assert any(n.startswith('--kv-transfer-config {"a":1} of spec.worker.args: replaced') for n in notes)
    assert any(n.startswith("spec.worker.environmentVariables[TOKEN].valueFrom:") for n in notes)
    assert any(n.startswith("VLLM_NIXL_SIDE_CHANNEL_PORT of spec.worker.environmentVariables") for n in notes)
    assert len(set(notes)) == len(notes) == 7


def test_nothing_replaced_means_no_notes(model: Path) -> None:
    assert planned(endpoint(["--seed", "1"]), CPU, model).notes == ()


@pytest.mark.parametrize(
    "unusable",
    [["--tensor-parallel-size", "8"], ["-pp", "2"], ["--data-parallel-size", "2"], ["--uds", "/tmp/s"]],
)
def test_flags_without_a_place_on_a_cpu_are_left_out_and_noted(model: Path, unusable: list[str]) -> None:
    result = planned(endpoint(["--seed", "1", *unusable]), CPU, model)
    assert not any(has_flag(flags(engine), unusable[0]) for engine in result.engines)
    [note] = result.notes
    assert note.startswith(f"{' '.join(unusable)} of spec.worker.args: left out; ")


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--nnodes"])
def test_engines_that_span_more_than_a_gpu_host_process_are_refused(model: Path, flag: str) -> None:
    with pytest.raises(EngineError, match=flag):
        planned(endpoint([flag, "2"]), GPU, model)
    planned(endpoint([flag, "1"]), GPU, model)


def test_a_config_file_is_passed_on_with_a_warning_that_its_flags_are_not_seen(model: Path) -> None:
    result = planned(endpoint(["--config", "/etc/vllm.yaml"]), CPU, model)
    assert flag_value(flags(result.engines[0]), "--config") == "/etc/vllm.yaml"
    assert any("does not see" in note for note in result.notes)


class TestTheModelsName:
    """Clients go on using the name that the manifest makes vLLM serve."""

    @pytest.mark.parametrize(
        ("args", "name"),
        [
            (["--model", "/opt/ml/model"], "/opt/ml/model"),
            (["--model=org/model"], "org/model"),
            (["serve", "org/model", "--seed", "1"], "org/model"),
            (["org/model"], "org/model"),
            (["--model", "/opt/ml/model", "--served-model-name", "first", "second"], "first"),
            (["--seed", "1"], "small"),
        ],
    )
    def test_is_the_manifests(self, model: Path, args: list[str], name: str) -> None:
        given = endpoint(args)
        assert served_model_name(given) == name
        for engine in planned(given, CPU, model).engines:
            assert flag_value(flags(engine), "--served-model-name") == name
            assert flag_value(flags(engine), "--model") == str(model)

    def test_must_be_the_same_for_both_roles(self, model: Path) -> None:
        given = endpoint(prefill_args=["--served-model-name", "a"], decode_args=["--served-model-name", "b"])
        with pytest.raises(EngineError, match="decoders serve b and prefillers a"):
            planned(given, CPU, model)


class TestOnCpu:
    def test_a_prefiller_takes_a_whole_prompt_in_a_step_and_a_decoder_keeps_its_steps_short(
        self, model: Path
    ) -> None:
        engines = planned(endpoint(), CPU, model).engines
        assert flag_value(flags(only(engines, Role.PREFILL)), "--max-num-batched-tokens") == "8192"
        assert flag_value(flags(only(engines, Role.DECODE)), "--max-num-batched-tokens") == "256"

    @pytest.mark.parametrize(
        ("args", "prefill", "decode"),
        [
            (["--max-model-len", "2k"], "2000", "256"),
            (["--max-model-len", "200k"], "32768", "256"),
            (["--max-num-seqs", "1024", "--max-model-len", "512"], "1024", "1024"),
            (["--no-enable-chunked-prefill", "--max-model-len", "100k"], "100000", "100000"),
            (["--max-num-batched-tokens", "300"], "300", "300"),
        ],
    )
    def test_the_step_follows_what_the_manifest_sets(
        self, model: Path, args: list[str], prefill: str, decode: str
    ) -> None:
        engines = planned(endpoint(args), CPU, model).engines
        assert flag_value(flags(only(engines, Role.PREFILL)), "--max-num-batched-tokens") == prefill
        assert flag_value(flags(only(engines, Role.DECODE)), "--max-num-batched-tokens") == decode

    def test_a_decoders_step_follows_from_the_model_and_the_cores_with_a_note(self, model: Path) -> None:
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
        (model / "config.json").write_text(json.dumps(shape | heads))
        decoder = only(planned(endpoint(), CPU, model).engines, Role.DECODE)
        assert flag_value(flags(decoder), "--max-num-batched-tokens") == "224"  # with 4 cores
        made = planned(endpoint(["--seed", "1"], prefillers=4, decoders=4), CPU, model)
        decoder = made.engines[-1]
        assert flag_value(flags(decoder), "--max-num-batched-tokens") == "48"  # with 1 core
        assert flag_value(flags(decoder), "--max-num-seqs") == "48", (
            "vLLM's own would be more than a step has"
        )
        [note] = made.notes
        assert note.startswith("--max-num-batched-tokens 48 for decode engines")
        given = planned(endpoint(["--max-num-batched-tokens", "300"]), CPU, model)
        assert not has_flag(flags(only(given.engines, Role.DECODE)), "--max-num-seqs")
        assert given.notes == ()

    @pytest.mark.parametrize("config", [None, "not json", "[]", '{"max_position_embeddings": "x"}'])
    def test_an_unknown_context_leaves_the_prefillers_step_to_vllm(
        self, tmp_path: Path, config: str | None
    ) -> None:
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        engine = only(planned(endpoint(), CPU, tmp_path).engines, Role.PREFILL)
        assert not has_flag(flags(engine), "--max-num-batched-tokens")

    def test_a_quarter_of_the_memory_is_kv_cache_shared_by_all_engines(self, model: Path) -> None:
        engines = planned(endpoint(prefillers=3), CPU, model).engines
        assert {flag_value(flags(e), "--kv-cache-memory-bytes") for e in engines} == {str(GIB)}

    def test_vllms_own_variable_for_it_is_respected(self, model: Path) -> None:
        given = endpoint(env=[{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "2"}])
        engine = planned(given, CPU, model).engines[0]
        assert not has_flag(flags(engine), "--kv-cache-memory-bytes")
        assert engine.environment({"VLLM_CPU_KVCACHE_SPACE": "9"})["VLLM_CPU_KVCACHE_SPACE"] == "2"

    def test_a_multimodal_models_context_is_that_of_its_text_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 4096}}')
        engine = only(planned(endpoint(), CPU, tmp_path).engines, Role.PREFILL)
        assert flag_value(flags(engine), "--max-num-batched-tokens") == "4096"

    @pytest.mark.parametrize(
        ("args", "eager"),
        [([], True), (["--no-enforce-eager"], False), (["-O3"], None), (["-cc.mode", "3"], None)],
    )
    def test_execution_is_eager_unless_the_manifest_asks_for_compilation(
        self, model: Path, args: list[str], eager: bool | None
    ) -> None:
        assert switch(flags(planned(endpoint(args), CPU, model).engines[0]), "--enforce-eager") is eager

    def test_variables_of_the_starting_shell_that_would_spoil_an_engine_are_kept_out(
        self, model: Path
    ) -> None:
        engine = planned(endpoint(), CPU, model).engines[0]
        shell = {
            "PATH": "/bin",
            "VLLM_CPU_KVCACHE_SPACE": "40",
            "VLLM_PLUGINS": "other",
            "OMP_NUM_THREADS": "64",
        }
        whole = engine.environment(shell)
        assert whole["PATH"] == "/bin"
        assert "VLLM_CPU_KVCACHE_SPACE" not in whole
        assert "VLLM_PLUGINS" not in whole
        assert whole["OMP_NUM_THREADS"] == "4"

    def test_hand_off_stays_on_the_machine(self, model: Path) -> None:
        given = endpoint(env=[{"name": "UCX_TLS", "value": "rc,cuda_copy"}])
        result = planned(given, CPU, model)
        assert result.engines[0].env["UCX_TLS"].startswith("sysv,posix")
        assert any(note.startswith("UCX_TLS of spec.worker.environmentVariables") for note in result.notes)


class TestOnGpu:
    def test_each_engine_gets_its_gpus_and_no_cores(self, model: Path) -> None:
        engines = planned(ENDPOINTS["s3"], GPU, model).engines
        assert [len(e.gpus) for e in engines] == [8, 8, 8]
        assert [e.env["CUDA_VISIBLE_DEVICES"] for e in engines][2] == "16,17,18,19,20,21,22,23"
        assert all(e.cpus == () and "OMP_NUM_THREADS" not in e.env for e in engines)
        assert all(e.environment({"VLLM_PLUGINS": "x"})["VLLM_PLUGINS"] == "x" for e in engines)

    def test_roles_may_need_different_numbers_of_gpus(self, model: Path) -> None:
        given = endpoint(["-tp", "2"], prefill_args=["--tensor-parallel-size", "1"], decode_args=["-pp", "2"])
        assert [len(e.gpus) for e in planned(given, GPU, model).engines] == [1, 4]

    def test_the_stock_connector_and_the_manifests_flags_are_used(self, model: Path) -> None:
        engine = only(planned(ENDPOINTS["nvme"], GPU, model).engines, Role.DECODE)
        assert (
            json.loads(flag_value(flags(engine), "--kv-transfer-config") or "")["kv_connector"]
            == "NixlConnector"
        )
        assert flag_value(flags(engine), "--gpu-memory-utilization") == "0.75"
        assert not has_flag(flags(engine), "--enforce-eager")
        assert not has_flag(flags(engine), "--kv-cache-memory-bytes")
        assert not has_flag(flags(engine), "--max-num-batched-tokens")

    def test_too_few_gpus_is_an_error(self, model: Path) -> None:
        with pytest.raises(EngineError, match="needs 16 GPUs"):
            planned(ENDPOINTS["nvme"], Machine((), ("0",), GIB, "cuda", "python"), model)


def test_environment_variables_refer_to_each_other_and_arguments_to_them_as_on_kubernetes(
    model: Path,
) -> None:
    given = endpoint(
        ["--seed", "$(SEED)", "--dtype", "$(UNKNOWN)", "--revision", "$$(SEED)"],
        env=[{"name": "N", "value": "4"}, {"name": "SEED", "value": "$(N)2"}, {"name": "EMPTY"}],
    )
    engine = planned(given, CPU, model).engines[0]
    assert engine.env["SEED"] == "42"
    assert engine.env["EMPTY"] == ""
    assert flag_value(flags(engine), "--seed") == "42"
    assert flag_value(flags(engine), "--dtype") == "$(UNKNOWN)"
    assert flag_value(flags(engine), "--revision") == "$(SEED)"


def test_engines_send_no_usage_statistics_unless_the_manifest_wants_it(model: Path) -> None:
    assert planned(endpoint(), CPU, model).engines[0].env["VLLM_NO_USAGE_STATS"] == "1"
    given = endpoint(env=[{"name": "VLLM_NO_USAGE_STATS", "value": "0"}])
    assert planned(given, CPU, model).engines[0].env["VLLM_NO_USAGE_STATS"] == "0"


@pytest.mark.parametrize(
    ("args", "prefill", "decode", "length"),
    [
        ([], [], [], None),
        (["--max-model-len", "8k"], [], [], 8000),
        ([], ["--max-model-len=9"], ["--max-model-len=7"], 7),
    ],
)
def test_the_longest_request_is_the_smaller_of_the_roles(
    args: list[str], prefill: list[str], decode: list[str], length: int | None
) -> None:
    assert max_model_len(endpoint(args, prefill_args=prefill, decode_args=decode)) == length


def test_a_number_that_is_none_is_an_error_that_names_the_flag(model: Path) -> None:
    with pytest.raises(EngineError, match="--max-model-len long: is not a number"):
        planned(endpoint(["--max-model-len", "long"]), CPU, model)


def test_an_endpoint_without_pd_spec_is_refused(model: Path) -> None:
    document = MANIFESTS["nvme"].replace(
        "  pdSpec: {routingThreshold: 0, prefillSpec: {}, decodingSpec: {}}\n", ""
    )
    with pytest.raises(EngineError, match=r"spec\.pdSpec"):
        plan(manifest(document), CPU, model, [])


def test_ports_must_be_given_for_every_engine(model: Path) -> None:
    with pytest.raises(ValueError, match="2 engines need as many ports; 1 were given"):
        plan(endpoint(), CPU, model, [EnginePorts(8101, 5601)])
