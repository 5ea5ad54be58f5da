"""The router's command line: read back by the router's own parser, and what stands in it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tandem.api import Role
from tandem.config import RouterConfig, add_router_arguments, router_config
from tandem.operator.routing import router_config as rendered_config

from .endpoints import VARIANTS, container, deployment, engine, of_kind, planned, pod, rendered

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


def test_engines_are_found_by_the_names_of_their_services() -> None:
    made = rendered("dpd-s3")
    assert config("dpd-s3").discover_dns == (
        "prefill=prefill-pd-s3.team-a.svc:8081",
        "decode=decode-pd-s3.team-a.svc:8081",
    )
    assert config("colocated-routing").discover_dns == ("both=chat-8b.team-a.svc:8081",)
    for service in of_kind(made, "Service"):
        if service["metadata"]["namespace"] == "team-a":
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["ipFamilyPolicy"] == "SingleStack"


def test_threshold_strategy_and_connector_are_the_resources() -> None:
    assert config("dpd-nvme").routing_threshold == 0
    assert config("dpd-s3").routing_threshold == 4096
    assert (config("dpd-s3").connector, config("dpd-huggingface").connector) == ("lmcache", "nixl")
    assert config("kvaware").routing_strategy == "kvaware"


def test_request_limits_are_the_routers_queue() -> None:
    found = config("limits")
    assert (found.max_concurrent_requests, found.max_queue_size, found.overflow_status_code) == (8, 4, 429)
    found = config("colocated-routing")
    assert (found.max_concurrent_requests, found.max_queue_size, found.overflow_status_code) == (64, 16, 503)
    assert config("dpd-s3").max_concurrent_requests is None


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
    found = config("dpd-huggingface", {"spec.worker.args": args})
    assert found.served_model_name == ("llama", "llama-70b")
    assert (found.max_model_len, found.kv_block_size) == (8000, 32)
    assert (found.chat_template, found.chat_template_content_format) == ("{{ messages }}", "openai")
    assert found.default_chat_template_kwargs == '{"enable_thinking": false}'
    assert found.exclude_tools_when_tool_choice_none


def test_a_template_in_a_file_of_the_model_container_is_not_the_routers_file() -> None:
    args = ["--model", "/opt/ml/model", "--chat-template", "/opt/ml/model/template.jinja"]
    assert config("dpd-huggingface", {"spec.worker.args": args}).chat_template is None


def test_the_models_path_is_its_name_unless_the_flags_say_another() -> None:
    assert config("dpd-s3").served_model_name == ("/opt/ml/model",)
    assert config("dpd-huggingface").served_model_name == ("llama-3-3-70b",)


def test_with_adapters_engines_say_which_models_there_are() -> None:
    args = ["--model", "/opt/ml/model", "--enable-lora", "--lora-modules", "sql=/adapters/sql"]
    assert config("dpd-huggingface", {"spec.worker.args": args}).served_model_name == ()


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


def test_with_lmcache_there_is_one_router_at_any_time() -> None:
    """Prefillers notify one address."""
    spec = deployment(rendered("dpd-s3"), "router")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert deployment(rendered("dpd-huggingface"), "router")["spec"]["strategy"]["type"] == "RollingUpdate"
