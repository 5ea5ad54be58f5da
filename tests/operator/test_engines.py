"""What model containers are started with, judged by vLLM's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import yaml

from tandem.api import Role
from tandem.engine.validation import validate
from tandem.operator import RenderError

from .endpoints import NAMES, VARIANTS, changed, endpoint, engine, of_kind, pod, rendered, variables

Parse = Callable[[Sequence[str]], argparse.Namespace]


def roles(name: str) -> tuple[Role | None, ...]:
    return tuple(Role) if endpoint(name).spec.pd_spec else (None,)


def parsed(parse: Parse, variant: str, role: Role | None) -> argparse.Namespace:
    return parse(engine(rendered(*VARIANTS[variant]), role)["args"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_takes_every_command_line(vllm_parse: Parse, variant: str) -> None:
    for role in roles(VARIANTS[variant][0]):
        found = parsed(vllm_parse, variant, role)
        assert found.port == 8000
        assert found.enable_prompt_tokens_details is (variant != "without a router")


@pytest.mark.parametrize("name", NAMES)
def test_the_resources_own_flags_come_through(vllm_parse: Parse, name: str) -> None:
    for role in roles(name):
        found = parsed(vllm_parse, name, role)
        assert found.model == "/opt/ml/model"
        assert found.tensor_parallel_size == (4 if name == "colocated-routing" else 8)


def test_a_roles_flags_are_its_own(vllm_parse: Parse) -> None:
    prefill, decode = (parsed(vllm_parse, "dpd-s3", role) for role in Role)
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (16, 32)
    assert (prefill.enforce_eager, decode.enforce_eager) == (True, False)


def test_nixl_is_the_connector_where_no_lmcache_is(vllm_parse: Parse) -> None:
    for role, kv_role in ((Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")):
        config = parsed(vllm_parse, "dpd-nixl", role).kv_transfer_config
        assert (config.kv_connector, config.kv_role) == ("NixlConnector", kv_role)
        assert config.kv_connector_extra_config["backends"] == ["LIBFABRIC"]


@pytest.mark.parametrize("name", ["dpd-s3", "dpd-huggingface"])
def test_lmcache_is_the_connector_of_hyperpods_samples(vllm_parse: Parse, name: str) -> None:
    """One image says by its name that it has LMCache, the other one's variables do."""
    for role, kv_role in ((Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")):
        config = parsed(vllm_parse, name, role).kv_transfer_config
        assert (config.kv_connector, config.kv_role) == ("LMCacheConnectorV1", kv_role)
        assert config.kv_connector_extra_config["discard_partial_chunks"] is False


def test_lmcaches_prefillers_take_a_prompt_in_one_step(vllm_parse: Parse) -> None:
    assert parsed(vllm_parse, "dpd-s3", Role.PREFILL).max_num_batched_tokens == 16_384


@pytest.mark.parametrize("own", [[], ["--enable-prefix-caching"]])
def test_lmcaches_decoders_keep_no_prefixes_of_their_own(vllm_parse: Parse, own: list[str]) -> None:
    made = rendered("dpd-s3", {"spec.pdSpec.decodingSpec.args": own})
    assert vllm_parse(engine(made, Role.DECODE)["args"]).enable_prefix_caching is False
    assert vllm_parse(engine(made, Role.PREFILL)["args"]).enable_prefix_caching is not False


def test_kvaware_makes_engines_publish_where_the_router_listens(vllm_parse: Parse) -> None:
    for role in Role:
        config = parsed(vllm_parse, "kvaware", role).kv_events_config
        assert (config.enable_kv_cache_events, config.publisher) == (True, "zmq")
        assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5557", "tcp://*:6557")


def test_a_transfer_configuration_of_its_own_is_replaced_and_told(vllm_parse: Parse) -> None:
    args = ["--model", "/opt/ml/model", "--kv-transfer-config", '{"kv_connector":"MooncakeConnector"}']
    made = rendered("dpd-nixl", {"spec.worker.args": args})
    config = vllm_parse(engine(made, Role.DECODE)["args"]).kv_transfer_config
    assert config.kv_connector == "NixlConnector"
    assert any("--kv-transfer-config of the decode engines: replaced" in note for note in made.notes)


CPU_NIXL = (
    '{"kv_connector":"CpuNixlConnector","kv_buffer_device":"cpu","kv_role":"kv_both","engine_id":"x",'
    '"kv_connector_extra_config":{"num_threads":1,"kv_lease_duration":5,"backends":["GDS"]}}'
)


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-transfer-config", CPU_NIXL],
        [
            *("--kv-transfer-config.kv_connector", "CpuNixlConnector"),
            *("--kv-transfer-config.kv_buffer_device", "cpu"),
            *("--kv-transfer-config.kv_connector_extra_config", '{"num_threads":1}'),
        ],
    ],
)
def test_of_a_transfer_configuration_for_nixl_an_engines_own_settings_stay(
    vllm_parse: Parse, given: list[str]
) -> None:
    made = rendered("dpd-nixl", {"spec.worker.args": ["--model", "/opt/ml/model", *given]})
    for role, kv_role in ((Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")):
        config = vllm_parse(engine(made, role)["args"]).kv_transfer_config
        assert (config.kv_connector, config.kv_buffer_device) == ("CpuNixlConnector", "cpu")
        assert (config.kv_role, config.engine_id == "x") == (kv_role, False)
        extra = config.kv_connector_extra_config
        assert extra == {"num_threads": 1, "kv_lease_duration": 30, "backends": ["LIBFABRIC"]}
    assert any(
        "decode engines: replaced" in note and "keeps kv_connector, kv_buffer_device" in note
        for note in made.notes
    )


@pytest.mark.parametrize(
    "given", ['{"kv_connector":"MooncakeConnector","kv_connector_extra_config":{"num_threads":1}}', "{}"]
)
def test_settings_for_another_connector_do_not_stay(vllm_parse: Parse, given: str) -> None:
    args = ["--model", "/opt/ml/model", "--kv-transfer-config", given]
    made = rendered("dpd-nixl", {"spec.worker.args": args})
    config = vllm_parse(engine(made, Role.DECODE)["args"]).kv_transfer_config
    assert "num_threads" not in config.kv_connector_extra_config


def test_a_transfer_configuration_that_cannot_be_read_is_an_error() -> None:
    args = ["--model", "/opt/ml/model", "--kv-transfer-config", "[1]"]
    with pytest.raises(RenderError, match="--kv-transfer-config"):
        rendered("dpd-nixl", {"spec.worker.args": args})


def test_references_are_left_for_kubernetes_to_fill_in() -> None:
    made = rendered(
        "dpd-s3",
        {
            "spec.worker.args": ["--model", "/opt/ml/model", "--max-model-len", "$(LEN)", "--seed", "$$(X)"],
            "spec.worker.environmentVariables": [{"name": "LEN", "value": "4096"}],
        },
    )
    args = engine(made, Role.PREFILL)["args"]
    assert args[3] == "$(LEN)"
    assert args[5] == "$$(X)"
    assert args[args.index("--max-num-batched-tokens") + 1] == "4096"  # what has to be known is


def test_a_command_is_kept() -> None:
    made = rendered("dpd-nvme", {"spec.worker.command": ["vllm", "serve"]})
    assert engine(made, Role.DECODE)["command"] == ["vllm", "serve"]
    assert "command" not in engine(rendered("dpd-nvme"), Role.DECODE)


def test_a_shell_as_command_is_told() -> None:
    made = rendered("dpd-nvme", {"spec.worker.command": ["/bin/bash", "-c", "exec vllm serve"]})
    assert any(note.startswith("spec.worker.command: is a shell") for note in made.notes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variable_is_given_twice_and_references_look_back(variant: str) -> None:
    """Kubernetes fills in what stands before."""
    for role in roles(VARIANTS[variant][0]):
        env = engine(rendered(*VARIANTS[variant]), role)["env"]
        seen: set[str] = set()
        for variable in env:
            assert variable["name"] not in seen
            assert "$(POD_IP)" not in variable.get("value", "") or "POD_IP" in seen
            seen.add(variable["name"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variable_is_as_the_resource_says_or_that_it_is_not_is_told(variant: str) -> None:
    """Also one that LMCache would read before its file."""
    name, changes = VARIANTS[variant]
    made = rendered(name, changes)
    files = [yaml.safe_load(c["data"].get("lmcache.yaml", "{}")) for c in of_kind(made, "ConfigMap")]
    keys = {f"LMCACHE_{key.upper()}" for file in files for key in file}
    for role in roles(name):
        before = {v["name"]: v for v in engine(made, role)["env"]}
        # Of this one others are made, and a role's annotation has another.
        tried = sorted((before.keys() | keys) - {"PD_BUFFER_SIZE", "A"})
        mine = [{"name": variable, "value": "7"} for variable in tried]
        size = [before["PD_BUFFER_SIZE"]] if "PD_BUFFER_SIZE" in before else []
        resource = {**changes, "spec.worker.environmentVariables": [*mine, *size]}
        after = {v["name"]: v for v in engine(rendered(name, resource), role)["env"]}
        replaced = [i for i, v in enumerate(mine) if after.get(v["name"]) != v]
        assert replaced
        for i in replaced:
            assert after.get(tried[i]) == before.get(tried[i])
        told = [f.path for f in validate(changed(name, resource)).findings if f.rule == "IEC521"]
        assert told == [f"spec.worker.environmentVariables[{i}]" for i in replaced]


def test_the_resources_variables_stay_as_they_are() -> None:
    found = variables(engine(rendered("dpd-s3"), Role.DECODE))
    assert found["PD_BUFFER_SIZE"] == "8589934592"
    assert found["LMCACHE_SAVE_DECODE_CACHE"] == "False"


def test_hashes_agree_between_pods_without_anyones_doing() -> None:
    made = rendered("dpd-s3", {"spec.worker.environmentVariables": []})
    assert {variables(engine(made, role))["PYTHONHASHSEED"] for role in Role} == {"0"}


def test_efa_comes_with_libfabric_and_its_environment() -> None:
    with_efa = rendered("dpd-nixl")
    for role in Role:
        found = engine(with_efa, role)
        assert variables(found)["FI_PROVIDER"] == "efa"
        assert found["resources"]["limits"]["vpc.amazonaws.com/efa"] == "16"
        assert found["resources"]["requests"]["vpc.amazonaws.com/efa"] == "16"
        assert (
            found["resources"]["limits"]["hugepages-2Mi"] == found["resources"]["requests"]["hugepages-2Mi"]
        )


def test_huge_pages_of_the_roles_own_stay_as_many() -> None:
    own = {"limits": {"nvidia.com/gpu": "8", "hugepages-2Mi": "1Gi"}}
    made = rendered("dpd-nixl", {"spec.pdSpec.decodingSpec.resources": own})
    found = engine(made, Role.DECODE)["resources"]
    assert found["limits"] == own["limits"] | {"vpc.amazonaws.com/efa": "16"}
    assert found["requests"]["vpc.amazonaws.com/efa"] == "16"
    assert found["requests"].get("hugepages-2Mi", "1Gi") == "1Gi"
    (sizes,) = (
        d["metadata"]["annotations"]["tandem.dev/sizes"]
        for d in of_kind(made, "Deployment")
        if d["metadata"]["name"] == "decode-pd-hf"
    )
    assert "EFA: 16 interfaces" in sizes
    assert "2 MiB pages" not in sizes


def test_without_efa_it_is_ucx_and_the_notes_say_so(vllm_parse: Parse) -> None:
    made = rendered(*VARIANTS["without EFA"])
    for role in Role:
        found = engine(made, role)
        assert "FI_PROVIDER" not in variables(found)
        assert "vpc.amazonaws.com/efa" not in found["resources"]["limits"]
        config = vllm_parse(found["args"]).kv_transfer_config
        assert config.kv_connector_extra_config["backends"] == ["UCX"]
    assert any("as those of ml.g6e.48xlarge are not known" in note for note in made.notes)


@pytest.mark.parametrize(
    ("count", "backend", "told"),
    [("4", "LIBFABRIC", {"NIXL_LOG_LEVEL"}), ("0", "UCX", {"UCX_PROTO_INFO"})],
)
def test_what_the_roles_resources_say_of_efa_counts(
    vllm_parse: Parse, count: str, backend: str, told: set[str]
) -> None:
    """Also for what engines are told to log, from which the operator learns over what KV goes."""
    wanted = {"limits": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": count}}
    made = rendered(
        "dpd-nixl",
        {"spec.pdSpec.prefillSpec.resources": wanted, "spec.pdSpec.decodingSpec.resources": wanted},
    )
    found = engine(made, Role.DECODE)
    config = vllm_parse(found["args"]).kv_transfer_config
    assert config.kv_connector_extra_config["backends"] == [backend]
    assert found["resources"]["limits"]["vpc.amazonaws.com/efa"] == count
    assert variables(found).keys() & {"NIXL_LOG_LEVEL", "UCX_PROTO_INFO"} == told


def test_one_role_without_efa_leaves_both_on_ucx(vllm_parse: Parse) -> None:
    """Both sides need the same plug-in."""
    made = rendered(
        "dpd-nixl",
        {
            "spec.pdSpec.decodingSpec.resources": {
                "limits": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "0"}
            }
        },
    )
    for role in Role:
        config = vllm_parse(engine(made, role)["args"]).kv_transfer_config
        assert config.kv_connector_extra_config["backends"] == ["UCX"]

    assert "EFA: none for the decode engines, as their resources say; KV goes over UCX" in made.notes


def test_instance_types_that_differ_in_efa_are_told_apart_from_unknown_ones() -> None:
    types = {"spec.instanceType": ..., "spec.instanceTypes": ["ml.p5.48xlarge", "ml.p5en.48xlarge"]}
    (note,) = [n for n in rendered("dpd-nixl", types).notes if n.startswith("EFA")]
    assert "as the types differ (ml.p5.48xlarge has 32, ml.p5en.48xlarge has 16); KV goes over UCX" in note


def test_a_worker_that_nothing_says_is_vllm_starts_what_its_image_says() -> None:
    """HyperPod's first sample: an image of DJL, whose own arguments start it. Ours would replace them."""
    other = {"spec.intelligentRoutingSpec": ..., "spec.kvCacheSpec": ..., "spec.worker.args": ...}
    image = {"spec.worker.image": "registry.example/djl-inference:0.32.0-lmi14.0.0-cu124"}
    assert "args" not in engine(rendered("colocated-routing", other | image), None)
    flags = {"spec.worker.args": ["--model", "/opt/ml/model"]}
    assert engine(rendered("colocated-routing", other | image | flags), None)["args"][2:] == [
        "--port",
        "8000",
    ]


def test_a_roles_annotations_reach_its_pods_alone() -> None:
    made = rendered(*VARIANTS["extensions by role"])
    prefill, decode = (pod(made, role) for role in Role)
    assert prefill["containers"][0]["image"] == "registry.example/vllm:prefill"
    assert decode["containers"][0]["image"] != prefill["containers"][0]["image"]
    assert variables(decode["containers"][0])["A"] == "b"
    assert "A" not in variables(prefill["containers"][0])
    assert {"key": "spot", "operator": "Exists"} in decode["tolerations"]
    assert {"name": "scratch", "emptyDir": {}} in prefill["volumes"]
    assert {"name": "scratch", "mountPath": "/scratch"} in prefill["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"spec.worker.modelInvocationPort.containerPort": 8081},
            "containerPort: is 8081, where the same pod has the reverse proxy",
        ),
        ({"spec.pdSpec.prefillSpec.args": ["-tp", "4"]}, "each rank writes to its own counterpart"),
        ({"spec.worker.args": ["--max-model-len", "many"]}, "many: is not a number"),
        ({"spec.worker.args": ["-dp", "2"]}, "one data-parallel rank"),
        (
            {"spec.worker.environmentVariables": [{"name": "PD_BUFFER_SIZE", "value": "8Gi"}]},
            r"environmentVariables\[PD_BUFFER_SIZE\]: must be a number of bytes",
        ),
        (
            {"spec.worker.environmentVariables": [{"name": "PD_BUFFER_SIZE", "value": "1000"}]},
            "do not hold one chunk",
        ),
        ({"metadata.annotations": {"tandem.dev/connector": "mooncake"}}, "tandem.dev/connector"),
        ({"spec.invocationEndpoint": "v1; return 200"}, "spec.invocationEndpoint: must be a plain path"),
        ({"spec.loadBalancer.healthCheckPath": "/a b"}, "spec.loadBalancer.healthCheckPath"),
    ],
)
def test_what_cannot_be_rendered_is_told_with_its_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RenderError, match=said):
        rendered("dpd-s3", changes)


def test_the_number_of_pods_is_the_roles() -> None:
    counts = {
        d["metadata"]["name"]: d["spec"].get("replicas") for d in of_kind(rendered("dpd-s3"), "Deployment")
    }
    assert counts == {"prefill-pd-s3": 2, "decode-pd-s3": 1, "pd-s3-team-a-router": 1}


UNNAMED = ["--tensor-parallel-size", "8"]
HUB = "meta-llama/Llama-3.3-70B-Instruct"
PIN = {"spec.modelSourceConfig.huggingFaceModel.commitSHA": "0" * 40}


@pytest.mark.parametrize(
    ("changes", "model", "revision"),
    [
        ({}, "/opt/ml/model", None),
        ({"spec.modelSourceConfig.prefetchEnabled": False}, HUB, None),
        ({"spec.modelSourceConfig.prefetchEnabled": False, **PIN}, HUB, "0" * 40),
        (PIN, "/opt/ml/model", None),
    ],
)
def test_a_model_that_no_flag_names_is_the_resources_and_so_is_its_name(
    vllm_parse: Parse, changes: dict[str, Any], model: str, revision: str | None
) -> None:
    """vLLM would take one of its own."""
    made = rendered("dpd-nixl", {"spec.worker.args": UNNAMED, **changes})
    for role in Role:
        found = vllm_parse(engine(made, role)["args"])
        assert (found.model, found.revision) == (model, revision)
        assert found.served_model_name == ["llama-3-3-70b"]
    router = pod(made, "router")["containers"][0]["args"]
    assert router[router.index("--served-model-name") + 1] == "llama-3-3-70b"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model", HUB], "0" * 40),
        (["--model", HUB, "--revision", "main"], "main"),
        (["--model", "another/model"], None),
    ],
)
def test_a_pinned_commit_is_that_of_the_model_that_the_engine_downloads(
    vllm_parse: Parse, args: list[str], expected: str | None
) -> None:
    changes = {"spec.worker.args": args, "spec.modelSourceConfig.prefetchEnabled": False, **PIN}
    found = vllm_parse(engine(rendered("dpd-nixl", changes), Role.PREFILL)["args"])
    assert (found.model, found.revision) == (args[1], expected)


def test_a_colocated_engine_without_a_router_may_be_any_and_is_told_no_model() -> None:
    changes = {"spec.intelligentRoutingSpec": ..., "spec.worker.args": []}
    assert "--model" not in engine(rendered("colocated-routing", changes), None)["args"]


def test_the_annotation_about_hand_offs_means_nothing_to_colocated_engines() -> None:
    changes = {"metadata.annotations": {"tandem.dev/connector": "nixl"}}
    assert rendered("colocated-routing", changes).objects == rendered("colocated-routing").objects
