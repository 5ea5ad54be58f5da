"""The connector of an endpoint and vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import json
import warnings

import pytest

from tandem.api import ANNOTATION_CONNECTOR, Role
from tandem.engine import EngineError, choose_connector, kv_transfer_config
from tandem.engine.kv_transfer import Accelerator

from .endpoints import endpoint


@pytest.mark.parametrize("annotations", [{}, {ANNOTATION_CONNECTOR: "auto"}, {ANNOTATION_CONNECTOR: "nixl"}])
def test_nixl_is_chosen_and_the_choice_has_a_reason(annotations: dict[str, str]) -> None:
    choice = choose_connector(endpoint(annotations=annotations))
    assert choice.name == "nixl"
    assert ("annotation" in choice.reason) == (annotations.get(ANNOTATION_CONNECTOR) == "nixl")


@pytest.mark.parametrize(
    ("asked", "why"), [("lmcache", "LMCache yet"), ("nxil", "not a connector Tandem knows")]
)
def test_another_connector_is_refused_with_what_works_today(asked: str, why: str) -> None:
    with pytest.raises(EngineError) as error:
        choose_connector(endpoint(annotations={ANNOTATION_CONNECTOR: asked}))
    assert f"metadata.annotations[{ANNOTATION_CONNECTOR}]" in str(error.value)
    assert why in str(error.value)
    assert "Use nixl" in str(error.value)


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


def test_a_lease_too_short_to_be_renewed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        kv_transfer_config(choose_connector(endpoint()), Role.PREFILL, "cpu", lease_seconds=5)
