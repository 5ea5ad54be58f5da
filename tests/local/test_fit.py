"""Flags that do not fit the model: told by their field, with a value that vLLM takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api import parse_endpoint
from tandem.engine import EnginePorts, Machine, engine_count, plan
from tandem.local.fit import fit_problems
from tandem.local.vllm_flags import find_sources, unknown_flags

from ..api.manifests import NVME
from ..engine.conftest import vllm_parser
from .models import CONFIG

__all__ = ["vllm_parser"]

SMOLLM2 = {
    **CONFIG,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
BLOCK = 128 * 23_040
"""Bytes of one of its KV blocks."""


def told(
    machine: Machine,
    model: Path,
    *args: str,
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    config: dict[str, Any] = SMOLLM2,
    env: dict[str, str] | None = None,
    vllm: Path | None = None,
) -> list[str]:
    """What is said of an endpoint with these flags of both roles, or of one."""
    raw = yaml.safe_load(NVME)
    raw["spec"]["worker"]["args"] = list(args)
    raw["spec"]["worker"]["environmentVariables"] = [{"name": k, "value": v} for k, v in (env or {}).items()]
    for spec, own in (("prefillSpec", prefill), ("decodingSpec", decode)):
        raw["spec"]["pdSpec"][spec]["args"] = list(own)
    endpoint, _ = parse_endpoint(yaml.safe_dump(raw), source="endpoint.yaml")
    ports = [EnginePorts(http=9000 + i, side_channel=9100 + i) for i in range(engine_count(endpoint))]
    engines = plan(endpoint, machine, model, ports).engines
    return list(map(str, fit_problems(endpoint, engines, config, vllm)))


def test_what_fits_is_not_told(machine: Machine, model: Path) -> None:
    assert told(machine, model) == []
    assert told(machine, model, "--max-model-len", "8192") == []


def test_a_context_longer_than_the_models_is_told_once(machine: Machine, model: Path) -> None:
    assert told(machine, model, "--max-model-len", "9000") == [
        "spec.worker.args: --max-model-len 9000: the model's context has 8,192 tokens "
        "(max_position_embeddings of its config.json); use that or less"
    ]
    (problem,) = told(machine, model, decode=("--max-model-len", "9k"))
    assert problem.startswith("spec.pdSpec.decodingSpec.args: --max-model-len 9000: ")


@pytest.mark.parametrize(
    "more",
    [
        {"config": {**SMOLLM2, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}},
        {"config": {"architectures": ["X"]}},
        {"env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}},
    ],
    ids=str,
)
def test_a_context_that_vllm_may_take_is_left_to_it(
    machine: Machine, model: Path, more: dict[str, Any]
) -> None:
    assert told(machine, model, "--max-model-len", "9000", **more) == []


def test_a_cache_that_does_not_hold_one_context_is_told_with_what_would(
    machine: Machine, model: Path
) -> None:
    """As vLLM has it: one block is its own."""
    enough = 65 * BLOCK
    assert told(machine, model, "--kv-cache-memory-bytes", str(enough)) == []
    assert told(machine, model, "--kv-cache-memory-bytes", str(enough - 1)) == [
        "spec.worker.args: --kv-cache-memory-bytes: 183 MiB of KV cache hold 8,064 tokens, and the context "
        f"has 8,192: set --max-model-len to 8064 or less, or --kv-cache-memory-bytes to {enough}"
    ]
    assert told(machine, model, "--kv-cache-memory-bytes", str(enough - 1), "--max-model-len", "8064") == []
    assert told(machine, model, "--kv-cache-memory-bytes", str(enough - 1), "--max-model-len", "auto") == []
    (problem,) = told(machine, model, decode=("--kv-cache-memory-bytes", "1"))
    assert problem.startswith(
        "spec.pdSpec.decodingSpec.args: --kv-cache-memory-bytes: 0 MiB of KV cache hold 0 tokens, and the "
        f"context has 8,192: --kv-cache-memory-bytes to {enough}"
    )


def test_every_way_to_size_the_cache_is_looked_at(machine: Machine, model: Path) -> None:
    (problem,) = told(machine, model, "--num-gpu-blocks-override", "64")
    assert problem.startswith("spec.worker.args: --num-gpu-blocks-override: ")
    assert told(machine, model, "--num-gpu-blocks-override", "65") == []
    (problem,) = told(machine, model, env={"VLLM_CPU_KVCACHE_SPACE": "0"})
    assert problem.startswith("spec.worker.environmentVariables: VLLM_CPU_KVCACHE_SPACE: 0 MiB")
    assert told(machine, model, env={"VLLM_CPU_KVCACHE_SPACE": "1"}) == []
    large = {**SMOLLM2, "max_position_embeddings": 1_000_000}
    problems = told(machine, model, config=large)
    assert [p.partition(":")[0] for p in problems] == ["prefill engines", "decode engines"]
    assert told(machine, model, "--dtype", "float32", "--kv-cache-memory-bytes", str(65 * BLOCK)) != []
    assert told(machine, model, "--dtype", "float32", "--kv-cache-memory-bytes", str(130 * BLOCK)) == []


@pytest.mark.parametrize(
    "kind",
    [
        {"sliding_window": 4096},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"kv_lora_rank": 512},
        {"mamba_d_state": 128},
    ],
    ids=str,
)
def test_caches_of_other_kinds_are_left_to_vllm(machine: Machine, model: Path, kind: dict[str, Any]) -> None:
    assert told(machine, model, "--kv-cache-memory-bytes", "1", config={**SMOLLM2, **kind}) == []


def test_a_window_that_is_off_does_not_count(machine: Machine, model: Path) -> None:
    off = {**SMOLLM2, "sliding_window": 4096, "use_sliding_window": False}
    assert told(machine, model, "--kv-cache-memory-bytes", "1", config=off) != []


def test_a_chat_template_that_is_nowhere_is_told(machine: Machine, model: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "chat.jinja"
    assert told(machine, model, "--chat-template", str(nowhere)) == [
        f"spec.worker.args: --chat-template {nowhere}: there is no such file on this machine"
    ]
    assert told(machine, model, "--chat-template", "{{ messages[0].content }}") == []
    nowhere.touch()
    assert told(machine, model, "--chat-template", str(nowhere)) == []


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """Sources with two flags."""
    folder = tmp_path / "vllm" / "engine"
    folder.mkdir(parents=True)
    (folder / "arg_utils.py").write_text('class A:\n    max_model_len: int = 1\n"--served-model-name"\n')
    (folder / "other.py").write_text('parser.add_argument("--only-here")\n')
    return folder.parent


def test_a_flag_that_vllm_does_not_have_is_told_with_the_nearest(
    machine: Machine, model: Path, vllm: Path
) -> None:
    assert told(machine, model, "--max-model-len=9", "--only-here", "--served-model", vllm=vllm) == []
    assert told(machine, model, "--max_model_length=9", decode=("--surely-not", "1"), vllm=vllm) == [
        "spec.worker.args: --max_model_length is no flag of the installed vLLM; did you mean "
        "--max-model-len?",
        "spec.pdSpec.decodingSpec.args: --surely-not is no flag of the installed vLLM",
    ]


def test_without_sources_every_flag_may_be_one(machine: Machine, model: Path, tmp_path: Path) -> None:
    assert told(machine, model, "--surely-not", vllm=tmp_path / "none") == []


def test_every_flag_of_the_real_vllm_is_found_in_its_sources(vllm_parser: Any) -> None:
    sources = find_sources(sys.executable)
    assert sources is not None
    flags = {o for action in vllm_parser._actions for o in action.option_strings if o.startswith("--")}
    flags = {flag for flag in flags if not flag.startswith("--no-")}
    assert len(flags) > 200
    assert unknown_flags(flags, sources) == {}
    assert unknown_flags(["--max-model-length"], sources) == {"--max-model-length": "--max-model-len"}
