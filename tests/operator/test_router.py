"""The router's command line: read back by the router's own parser, and what stands in it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tandem.api import Role
from tandem.config import RouterConfig, add_router_arguments, kubernetes_source, router_config
from tandem.engine.roles import expand
from tandem.operator.errors import RenderError
from tandem.operator.model_files import NAMES
from tandem.operator.names import KV_LAYOUT_LABEL
from tandem.operator.routing import router_config as rendered_config
from tandem.prompt import FILES, MARKS
from tandem.router.discovery.kubernetes import LABELS
from tandem.router.discovery.kubernetes import ROLE_LABEL as discovered_role

from .endpoints import ROLE_LABEL, VARIANTS, container, deployment, engine, of_kind, planned, pod, rendered

ROUTED = [name for name in VARIANTS if name != "without a router"]


def config(variant: str, changes: dict[str, Any] | None = None) -> RouterConfig:
    """What the router of a rendered pod reads from its arguments."""
    name, own = VARIANTS[variant]
    made = rendered(name, {**own, **(changes or {})})
    parser = argparse.ArgumentParser()
    add_router_arguments(parser)
    return router_config(parser.parse_args(container(pod(made, "router"), "router-container")["args"]))


@pytest.mark.parametrize("variant", ROUTED)
def test_the_router_reads_back_what_was_meant(variant: str) -> None:
    assert config(variant) == rendered_config(planned(*VARIANTS[variant]))


def test_engines_are_the_pods_of_the_endpoint() -> None:
    """Of both roles, and of a colocated endpoint before or after it: while one becomes the other, those that
    are ready serve."""
    assert (
        config("dpd-s3").discover_kubernetes == "team-a:8081:app=pd-s3,deploying-service=hyperpod-inference"
    )
    assert config("colocated-routing").discover_kubernetes == (
        "team-a:8081:app=chat-8b,deploying-service=hyperpod-inference"
    )
    for variant in ROUTED:
        made = rendered(*VARIANTS[variant])
        namespace, port, selector = kubernetes_source(config(variant).discover_kubernetes or "")
        asked = {tuple(requirement.split("=")) for requirement in selector.split(",")}
        for found in of_kind(made, "Deployment"):
            component = found["metadata"]["labels"]["tandem.dev/component"]
            labels = found["spec"]["template"]["metadata"]["labels"]
            here = found["metadata"]["namespace"] == namespace and asked <= labels.items()
            assert here is (component != "router")
            if here:
                proxy = container(found["spec"]["template"]["spec"], "sidecar-reverse-proxy")
                assert port in [p["containerPort"] for p in proxy["ports"]]
                assert labels.get(ROLE_LABEL, "worker") == component


def test_the_router_looks_for_the_labels_that_pods_have() -> None:
    assert (LABELS["kv-layout"], discovered_role) == (KV_LAYOUT_LABEL, ROLE_LABEL)


def test_engines_pair_by_the_layout_of_their_kv_and_by_nothing_else() -> None:
    """The revision of a pod is that of its Deployment, of which each role has one."""
    assert config("dpd-s3").pairing == config("dpd-nixl").pairing == ("kv-layout",)


def test_threshold_strategy_and_connector_are_the_resources() -> None:
    assert config("dpd-nvme").routing_threshold == 0
    assert config("dpd-s3").routing_threshold == 4096
    assert config("dpd-s3").connector == config("dpd-huggingface").connector == "lmcache"
    assert config("dpd-nixl").connector == "nixl"
    assert config("kvaware").routing_strategy == "kvaware"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (..., "/invocations"),
        ("v1/chat/completions", "/v1/chat/completions"),
        ("/my/model/", "/my/model"),
        ("/", "/"),
    ],
)
def test_the_invocation_endpoint_is_a_path_of_the_router_where_the_load_balancer_leads(
    given: Any, path: str
) -> None:
    changes = {"spec.invocationEndpoint": given}
    assert config("dpd-s3", changes).invocation_path == path
    (ingress,) = of_kind(rendered("dpd-s3", changes), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    assert [found["path"] for found in rule["http"]["paths"]] == [path]


def test_request_limits_are_the_routers_queue() -> None:
    found = config("limits")
    assert (found.max_concurrent_requests, found.max_queue_size, found.overflow_status_code) == (8, 4, 429)
    found = config("colocated-routing")
    assert (found.max_concurrent_requests, found.max_queue_size, found.overflow_status_code) == (64, 16, 503)
    assert config("dpd-s3").max_concurrent_requests is None


def test_api_keys_are_a_file_of_a_secret_and_only_that() -> None:
    """Whoever writes endpoints may name any Secret of the router's namespace."""
    path = config("API keys").api_keys_file
    assert path is not None
    folder, _, name = path.rpartition("/")
    found = pod(rendered(*VARIANTS["API keys"]), "router")
    (volume,) = [v for v in found["volumes"] if "secret" in v]
    assert volume["secret"] == {"secretName": "keys-of-chat", "items": [{"key": name, "path": name}]}
    mounts = [(c["name"], m) for c in found["containers"] for m in c["volumeMounts"]]
    mount = {"name": volume["name"], "mountPath": folder, "readOnly": True}
    assert [(where, m) for where, m in mounts if m["name"] == volume["name"]] == [("router-container", mount)]
    assert config("dpd-nixl").api_keys_file is None
    assert not [v for v in pod(rendered("dpd-nixl"), "router")["volumes"] if "secret" in v]


def test_api_keys_without_a_router_are_refused() -> None:
    """Nobody would ask for them."""
    keys = {"metadata.annotations": {"tandem.dev/api-keys-secret": "keys"}}
    with pytest.raises(RenderError, match=r"api-keys-secret\]: is for a router, and there is none"):
        rendered("colocated-routing", {**keys, "spec.intelligentRoutingSpec": ...})
    assert config("colocated-routing", keys).api_keys_file is not None


def test_lmcache_meets_the_engines_own_figures() -> None:
    found = config("dpd-s3")
    assert found.lmcache_receivers == (
        "7300,7301,7302,7303,7304,7305,7306,7307:7400,7401,7402,7403,7404,7405,7406,7407",
    )
    assert found.lmcache_ranks == 8
    assert found.lmcache_buffer_chunks == (8 << 30) // (40_960 * 256)
    assert found.lmcache_step_tokens == 16_384
    assert found.lmcache_notify.endswith(":7500")


@pytest.mark.parametrize("variant", ["kvaware", "kvaware colocated"])
def test_kvaware_listens_where_engines_publish(variant: str) -> None:
    found = config(variant)
    assert (found.kv_events, found.kv_replay) == ("tcp://*:5557", "tcp://*:6557")
    role = None if "colocated" in variant else Role.PREFILL
    args = engine(rendered(*VARIANTS[variant]), role)["args"]
    assert '"endpoint":"tcp://*:5557"' in args[args.index("--kv-events-config") + 1]


def test_flags_that_shape_prompts_reach_the_router() -> None:
    args = [
        *("--model", "/opt/ml/model", "--max-model-len", "8k", "--block-size", "32"),
        *("--served-model-name", "llama", "llama-70b"),
        *("--chat-template", "{{ messages }}", "--chat-template-content-format", "openai"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        "--exclude-tools-when-tool-choice-none",
    ]
    found = config("dpd-nixl", {"spec.worker.args": args})
    assert found.served_model_name == ("llama", "llama-70b")
    assert (found.max_model_len, found.kv_block_size) == (8000, 32)
    assert (found.chat_template, found.chat_template_content_format) == ("{{ messages }}", "openai")
    assert found.default_chat_template_kwargs == '{"enable_thinking": false}'
    assert found.exclude_tools_when_tool_choice_none


def test_a_template_in_a_file_of_the_model_container_is_not_the_routers_file() -> None:
    args = ["--model", "/opt/ml/model", "--chat-template", "/opt/ml/model/template.jinja"]
    assert config("dpd-nixl", {"spec.worker.args": args}).chat_template is None


@pytest.mark.parametrize("variant", ["dpd-s3", "dpd-nixl", "dpd-nvme", "colocated-routing"])
def test_the_router_counts_with_the_files_that_model_pods_serve(variant: str) -> None:
    """The path is one that the proxies of all pods serve, and the folder one that the router may write to."""
    made, found = rendered(*VARIANTS[variant]), config(variant)
    confs = [o["data"]["nginx.conf"] for o in of_kind(made, "ConfigMap") if "nginx.conf" in o["data"]]
    assert len(confs) == len(planned(*VARIANTS[variant]).pools)
    for conf in confs:
        assert f"location ~ ^{found.model_files_path}(" in conf
    mounts = container(pod(made, "router"), "router-container")["volumeMounts"]
    assert str(found.model_files_cache).startswith(tuple(f"{m['mountPath']}/" for m in mounts))
    assert not [note for note in made.notes if note.startswith("counting")]


OTHER_FILES = {
    "--tokenizer": ("--tokenizer", "/opt/ml/model/tokenizer"),
    "--tokenizer of the Hub": ("--tokenizer", "org/tokenizer"),
    "--tokenizer-mode": ("--tokenizer-mode", "mistral"),
    "--chat-template": ("--chat-template", "/opt/ml/model/template.jinja"),
    "a model of the Hub": ("--model", "org/model"),
    "a folder of the image": ("--model", "/models/baked-in"),
    "an odd name": ("--model", "/opt/ml/model/a b"),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
@pytest.mark.parametrize("role", ["worker", "pdSpec.decodingSpec", "pdSpec.prefillSpec"])
def test_files_that_engines_do_not_count_with_are_neither_served_nor_used_and_a_note_says_so(
    kind: str, role: str
) -> None:
    flags = list(OTHER_FILES[kind])
    args = ["--model", "/opt/ml/model", "--served-model-name", "m", "--max-model-len", "8k"]
    changes: dict[str, Any] = {"spec.worker.args": args}
    changes[f"spec.{role}.args"] = [*args, *flags] if role == "worker" else flags
    found = config("dpd-nixl", changes)
    assert (found.model_files_path, found.model_files_cache) == (None, None)
    made = rendered(VARIANTS["dpd-nixl"][0], changes)
    (note,) = [note for note in made.notes if note.startswith("counting")]
    assert flags[1].partition("a b")[0] in note or "modelVolumeMount" in note
    files = [o["data"]["nginx.conf"] for o in of_kind(made, "ConfigMap") if "nginx.conf" in o["data"]]
    assert sum("/tandem/model/" in conf for conf in files) == (0 if role == "worker" else 1)


@pytest.mark.parametrize(
    "flags",
    [
        ("--tokenizer", "/opt/ml/model/"),
        ("--tokenizer-mode", "hf"),
        ("--chat-template", "{{ messages }}"),
        ("--tokenizer=/opt/ml/model", "--tokenizer-mode=auto"),
    ],
)
def test_flags_that_say_the_same_as_the_files_leave_them_in_use(flags: tuple[str, ...]) -> None:
    args = ["--model", "/opt/ml/model", "--max-model-len", "8k", *flags]
    assert config("dpd-nixl", {"spec.worker.args": args}).model_files_path == "/tandem/model/"


def test_pods_serve_all_that_the_router_asks_for() -> None:
    assert sorted(NAMES) == sorted((*FILES, *MARKS))


def test_the_models_path_is_its_name_unless_the_flags_say_another() -> None:
    assert config("dpd-s3").served_model_name == ("/opt/ml/model",)
    assert config("dpd-nixl").served_model_name == ("llama-3-3-70b",)


def test_with_adapters_engines_say_which_models_there_are() -> None:
    args = ["--model", "/opt/ml/model", "--enable-lora", "--lora-modules", "sql=/adapters/sql"]
    assert config("dpd-nixl", {"spec.worker.args": args}).served_model_name == ()


def test_the_admin_port_stays_in_the_pod() -> None:
    found = config("dpd-s3")
    assert (found.admin_host, found.admin_port) == ("127.0.0.1", 8001)
    ports = container(pod(rendered("dpd-s3"), "router"), "router-container")["ports"]
    assert 8001 not in [port["containerPort"] for port in ports]


@pytest.mark.parametrize("variant", ROUTED)
def test_the_router_may_finish_its_answers(variant: str) -> None:
    found = config(variant)
    grace = pod(rendered(*VARIANTS[variant]), "router")["terminationGracePeriodSeconds"]
    assert grace > found.drain_delay + found.drain_timeout


@pytest.mark.parametrize("variant", ROUTED)
def test_a_router_may_wait_for_its_engines_as_long_as_these_may_take(variant: str) -> None:
    """It is not ready before them: with a shorter deadline the endpoint counted as failed while they load."""
    found = of_kind(rendered(*VARIANTS[variant]), "Deployment")
    assert {made["spec"]["progressDeadlineSeconds"] for made in found} == {3600}


def test_with_lmcache_there_is_one_router_at_any_time() -> None:
    """Prefillers notify one address."""
    spec = deployment(rendered("dpd-s3"), "router")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert deployment(rendered("dpd-nixl"), "router")["spec"]["strategy"]["type"] == "RollingUpdate"


@pytest.mark.parametrize("variant", ROUTED)
def test_a_router_that_leaves_stays_reachable_as_long_as_it_takes_requests(variant: str) -> None:
    """Where it is the only one, requests go to it until its pod is not ready: by its probe, or because one of
    its containers has ended."""
    found = deployment(rendered(*VARIANTS[variant]), "router")
    spec = found["spec"]["template"]["spec"]
    router, *others = spec["containers"]
    takes = config(variant).drain_delay
    probe = router["readinessProbe"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"]
    if found["spec"]["strategy"]["type"] == "Recreate":
        assert noticed < takes, "prefillers must have let go of it before it is gone"
    else:
        assert noticed > takes
    assert all(other["lifecycle"]["preStop"]["sleep"]["seconds"] == takes for other in others)
    assert spec["terminationGracePeriodSeconds"] > takes


def test_the_router_finds_its_token_where_clients_of_the_api_look() -> None:
    of_pod = pod(rendered("dpd-s3"), "router")
    mounts = container(of_pod, "router-container")["volumeMounts"]
    (mount,) = (m for m in mounts if m["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount")
    (volume,) = (v for v in of_pod["volumes"] if v["name"] == mount["name"])
    kinds = {kind: source for found in volume["projected"]["sources"] for kind, source in found.items()}
    assert kinds["serviceAccountToken"]["path"] == "token"
    assert kinds["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert kinds["downwardAPI"]["items"][0]["path"] == "namespace"


def test_kubernetes_fills_nothing_in_that_the_resource_means_as_it_is() -> None:
    """Of `$$` it leaves one, and `$(NAME)` is a variable's value."""
    name = "a$$b-$(POD_IP)"
    template = "{{ messages }} costs $$5 and $(HOME)"
    made = rendered(
        "dpd-s3",
        {
            "spec.modelName": name,
            "spec.worker.modelVolumeMount.mountPath": "/models/$(POD_IP)$$",
            "spec.worker.args": [
                "--tensor-parallel-size",
                "8",
                "--chat-template",
                template.replace("$", "$$"),
            ],
            "spec.kvCacheSpec": {"cacheConfigFile": "/etc/$(POD_IP)"},
        },
    )
    started = [expand(word, {"POD_IP": "10.0.0.8"}) for word in engine(made, Role.DECODE)["args"]]
    assert started[started.index("--served-model-name") + 1] == name
    assert started[started.index("--model") + 1] == "/models/$(POD_IP)$$"
    routed = [expand(word, {}) for word in container(pod(made, "router"), "router-container")["args"]]
    assert routed[routed.index("--chat-template") + 1] == template
    assert routed[routed.index("--served-model-name") + 1] == name
    (file,) = (v["value"] for v in engine(made, Role.DECODE)["env"] if v["name"] == "LMCACHE_CONFIG_FILE")
    assert expand(file, {"POD_IP": "10.0.0.8"}) == "/etc/$(POD_IP)"
