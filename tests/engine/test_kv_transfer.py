"""The connector of an endpoint and vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from tandem.api import ANNOTATION_CONNECTOR, Role
from tandem.engine import EngineError, choose_connector, kv_transfer_config, startable_connector
from tandem.engine.kv_transfer import CONNECTORS, Accelerator

from .endpoints import endpoint

LMCACHE_IMAGE = "lmcache/vllm-openai:v0.4.3"
HYPERPOD_IMAGE = "public.ecr.aws/deep-learning-containers/vllm:server-hyperpod-cuda-v1.1"
BUFFER = {"name": "PD_BUFFER_SIZE", "value": "8589934592"}
SEED = {"name": "PYTHONHASHSEED", "value": "0"}
LMCACHE_ARGS = ["--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer"}']


@pytest.mark.parametrize("annotations", [{}, {ANNOTATION_CONNECTOR: "auto"}, {ANNOTATION_CONNECTOR: "nixl"}])
def test_nixl_is_chosen_and_the_choice_has_a_reason(annotations: dict[str, str]) -> None:
    choice = choose_connector(endpoint(annotations=annotations))
    assert choice.name == "nixl"
    assert choice.asked == (annotations.get(ANNOTATION_CONNECTOR) == "nixl")
    assert ("annotation" in choice.reason) == choice.asked


@pytest.mark.parametrize(
    ("resource", "why"),
    [
        ({"image": LMCACHE_IMAGE}, LMCACHE_IMAGE),
        ({"prefill_args": LMCACHE_ARGS}, "--kv-transfer-config"),
        ({"image": HYPERPOD_IMAGE, "env": [BUFFER, SEED]}, "the variable PD_BUFFER_SIZE"),
        (
            {"env": [SEED, {"name": "LMCACHE_SAVE_DECODE_CACHE", "value": "False"}]},
            "LMCACHE_SAVE_DECODE_CACHE",
        ),
        ({"annotations": {"tandem.dev/decode-env": json.dumps([BUFFER])}}, "the variable PD_BUFFER_SIZE"),
    ],
    ids=["image", "flags", "HyperPod's guide", "another variable", "a role's variable"],
)
def test_lmcache_is_chosen_where_the_resource_tells_that_engines_have_it(
    resource: dict[str, Any], why: str
) -> None:
    choice = choose_connector(endpoint(**resource))
    assert (choice.name, choice.asked) == ("lmcache", False)
    assert why in choice.reason


@pytest.mark.parametrize(
    "resource",
    [
        {"image": HYPERPOD_IMAGE, "env": [SEED]},
        {"env": [{"name": "NOT_LMCACHE_S", "value": "x"}]},
        {"env": [BUFFER], "args": ["--kv-transfer-config", '{"kv_connector":"NixlConnector"}']},
    ],
    ids=["a hash seed", "a name like it", "left beside flags of another connector"],
)
def test_what_other_engines_may_have_too_tells_nothing_of_lmcache(resource: dict[str, Any]) -> None:
    assert choose_connector(endpoint(**resource)).name == "nixl"


@pytest.mark.parametrize("name", CONNECTORS)
def test_the_annotation_overrides_what_the_image_carries(name: str) -> None:
    choice = choose_connector(endpoint(image=LMCACHE_IMAGE, annotations={ANNOTATION_CONNECTOR: name}))
    assert (choice.name, choice.asked) == (name, True)


def test_a_connector_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(EngineError) as error:
        choose_connector(endpoint(annotations={ANNOTATION_CONNECTOR: "nxil"}))
    assert f"metadata.annotations[{ANNOTATION_CONNECTOR}]: is 'nxil'" in str(error.value)
    assert "auto, nixl, lmcache" in str(error.value)


def test_where_there_is_no_lmcache_nixl_hands_over_and_a_note_says_so() -> None:
    choice, note = startable_connector(choose_connector(endpoint(image=LMCACHE_IMAGE)), lmcache=None)
    assert choice.name == "nixl"
    assert LMCACHE_IMAGE in str(note)
    assert "replaced by NIXL" in str(note)


def test_lmcache_that_was_asked_for_by_name_is_not_replaced_in_silence() -> None:
    asked = choose_connector(endpoint(annotations={ANNOTATION_CONNECTOR: "lmcache"}))
    with pytest.raises(EngineError, match="use nixl, or leave the annotation out"):
        startable_connector(asked, lmcache=None)
    assert startable_connector(asked, lmcache="0.5.6") == (asked, None)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("role", list(Role))
def test_vllm_takes_the_configuration_of_every_role(accelerator: Accelerator, role: Role) -> None:
    text = kv_transfer_config(choose_connector(endpoint()), role, accelerator, lease_seconds=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config_module = pytest.importorskip("vllm.config.kv_transfer", reason="needs vLLM: run `make setup`")
        config = config_module.KVTransferConfig(**json.loads(text))
    assert config.is_kv_producer == (role is Role.PREFILL)
    assert config.is_kv_consumer == (role is Role.DECODE)
    assert config.kv_load_failure_policy == "fail"
    assert config.get_from_extra_config("kv_lease_duration", None) == 60
    assert config.kv_connector == ("CpuNixlConnector" if accelerator == "cpu" else "NixlConnector")
    assert ("kv_buffer_device" in json.loads(text)) == (accelerator == "cpu")


@pytest.mark.parametrize(
    ("accelerator", "connector"), [("cpu", "CpuLMCacheConnector"), ("cuda", "LMCacheConnectorV1")]
)
def test_lmcaches_parts_find_each_other_by_the_engines_name(accelerator: Accelerator, connector: str) -> None:
    chosen = choose_connector(endpoint(image=LMCACHE_IMAGE))
    config = json.loads(kv_transfer_config(chosen, Role.DECODE, accelerator, name="decode-8101"))
    assert config == {
        "kv_connector": connector,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"discard_partial_chunks": False, "lmcache_rpc_port": "decode-8101"},
    }


def test_a_lease_too_short_to_be_renewed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        kv_transfer_config(choose_connector(endpoint()), Role.PREFILL, "cpu", lease_seconds=5)
