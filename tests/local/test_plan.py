"""What one machine would start for an endpoint, and that each field of a manifest means what is told."""

from __future__ import annotations

import argparse
import copy
import json
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api import parse_endpoint
from tandem.config import STRATEGIES, add_router_arguments, router_config
from tandem.engine import EngineError, EnginePorts, Machine
from tandem.local import paths, plan, preflight
from tandem.local.builtin import MODEL_ID, builtin_folder
from tandem.local.errors import LocalError
from tandem.local.manifest import read_manifest
from tandem.local.plan import LocalPlan, make_plan

from ..api.manifests import COLOCATED, HUGGING_FACE, NVME, S3
from .models import model_folder
from .test_fields import ACTED_ON


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ports are free, whatever else runs on this machine."""

    def engine_ports(count: int, host: str, *, but: Any, ranks: int) -> list[EnginePorts]:
        return [
            EnginePorts(8100 + i, 5600 + i, init=(7300 + i,) * ranks, alloc=(7400 + i,) * ranks)
            for i in range(count)
        ]

    monkeypatch.setattr(preflight, "require_free", lambda port, host: None)
    monkeypatch.setattr(plan, "engine_ports", engine_ports)
    monkeypatch.setattr(plan, "notify_port", lambda host, *, but: 7500)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def planned(raw: dict[str, Any] | str, machine: Machine, **options: Any) -> LocalPlan:
    text = raw if isinstance(raw, str) else yaml.safe_dump(raw, sort_keys=False)
    endpoint, document = parse_endpoint(text, source="endpoint.yaml")
    return make_plan(endpoint, document, machine, "/venv/bin/python", **options)


def test_every_engine_and_the_router_are_started(model: Path, machine: Machine) -> None:
    made = planned(S3, machine, model=model, port=9000)
    assert [p.name for p in made.processes] == ["prefill-0", "prefill-1", "decode-0", "router"]
    assert made.url == "http://127.0.0.1:9000"
    assert made.processes[0].cpus == made.engines[0].cpus != ()
    assert made.processes[-1].env is None
    assert list(made.router_argv[:5]) == ["/venv/bin/python", "-P", "-m", "tandem", "router"]


def test_the_routers_command_line_says_what_was_planned(model: Path, machine: Machine) -> None:
    made = planned(S3, machine, model=model)
    parser = argparse.ArgumentParser()
    add_router_arguments(parser)
    config = router_config(parser.parse_args(list(made.router_argv[5:])))
    assert config == made.router
    assert config.prefill == ("http://127.0.0.1:8100", "http://127.0.0.1:8101")
    assert config.decode == ("http://127.0.0.1:8102",)
    assert config.routing_threshold == 4096
    assert config.model_path == str(model)
    assert config.explain


def test_with_lmcache_the_router_knows_how_kv_is_handed_over(model: Path, machine: Machine) -> None:
    made = planned(S3, replace(machine, lmcache="0.5.6"), model=model)
    assert made.router.connector == "lmcache"
    assert made.router.lmcache_receivers == ("127.0.0.1:7302:7402",)
    assert made.router.lmcache_notify == "127.0.0.1:7500"
    assert made.router.lmcache_chunk_size == 256
    assert made.router.lmcache_buffer_chunks
    parser = argparse.ArgumentParser()
    add_router_arguments(parser)
    assert router_config(parser.parse_args(list(made.router_argv[5:]))) == made.router


def test_the_curl_line_is_one_shell_command_for_this_model(model: Path, machine: Machine) -> None:
    words = shlex.split(planned(HUGGING_FACE, machine, model=model).curl())
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "llama-3-3-70b"


def test_an_ipv6_host_is_bracketed_in_the_url(model: Path, machine: Machine) -> None:
    assert planned(NVME, machine, model=model, host="::1").url == "http://[::1]:8000"


def test_the_plan_as_data_is_json(model: Path, machine: Machine) -> None:
    made = planned(S3, machine, model=model)
    data = json.loads(json.dumps(made.as_dict()))
    assert [(e["name"], e["role"], e["url"]) for e in data["engines"]] == [
        ("prefill-0", "prefill", "http://127.0.0.1:8100"),
        ("prefill-1", "prefill", "http://127.0.0.1:8101"),
        ("decode-0", "decode", "http://127.0.0.1:8102"),
    ]
    assert data["router"]["argv"] == list(made.router_argv)
    assert "spec.loadBalancer" in data["unusedFields"]
    assert data["model"] == str(model)


def test_the_invocation_endpoint_is_a_path_of_the_router(model: Path, machine: Machine) -> None:
    for endpoint, path in (("v1/chat/completions", "/v1/chat/completions"), ("/a/b/", "/a/b")):
        asked = S3.replace("invocationEndpoint: v1/chat/completions", f"invocationEndpoint: {endpoint}")
        assert planned(asked, machine, model=model).router.invocation_path == path
    with pytest.raises(LocalError, match=r"^spec\.invocationEndpoint: '/a\?b' is not a plain path"):
        planned(asked.replace("/a/b/", "a?b"), machine, model=model)
    without = "".join(line for line in S3.splitlines(keepends=True) if "invocationEndpoint" not in line)
    assert planned(without, machine, model=model).router.invocation_path == "/invocations"


def test_a_colocated_endpoint_is_refused_by_the_field(model: Path, machine: Machine) -> None:
    with pytest.raises(LocalError, match=r"^spec\.pdSpec is missing"):
        planned(COLOCATED, machine, model=model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_strategy_of_the_resource_reaches_the_router(
    model: Path, machine: Machine, strategy: str, replicas: int
) -> None:
    asked = S3.replace("prefixaware", strategy).replace("replicas: 2", f"replicas: {replicas}")
    plan = planned(asked, machine, model=model)
    assert plan.router.routing_strategy == strategy
    assert not any("routingStrategy" in note for note in plan.notes)


def test_without_a_strategy_the_default_of_the_resource_is_taken(model: Path, machine: Machine) -> None:
    raw = yaml.safe_load(S3)
    del raw["spec"]["intelligentRoutingSpec"]
    assert planned(raw, machine, model=model).router.routing_strategy == "prefixaware"


KVAWARE = S3.replace("prefixaware", "kvaware")


def test_with_kvaware_the_router_is_told_where_each_engine_publishes(model: Path, machine: Machine) -> None:
    made = planned(KVAWARE, machine, model=model)
    specs = [*made.router.specs("prefill"), *made.router.specs("decode")]
    assert [spec.url for spec in specs] == [e.url for e in made.engines]
    told = set()
    for engine, spec in zip(made.engines, specs, strict=True):
        config = json.loads(engine.argv[engine.argv.index("--kv-events-config") + 1])
        assert spec.kv_events is not None
        assert (spec.kv_events.events, spec.kv_events.replay) == (
            config["endpoint"],
            config["replay_endpoint"],
        )
        told |= {spec.kv_events.events, spec.kv_events.replay}
    assert len(told) == 2 * len(made.engines)
    assert made.sockets is not None
    assert {Path(str(where).removeprefix("ipc://")).parent for where in told} == {made.sockets}
    assert not made.sockets.exists(), "a plan makes nothing"


def test_without_kvaware_nothing_is_published(model: Path, machine: Machine) -> None:
    made = planned(S3, machine, model=model)
    assert made.sockets is None
    assert not any("kv-events" in arg for p in made.processes for arg in p.argv)


def test_the_router_knows_the_size_of_the_prefillers_blocks(model: Path, machine: Machine) -> None:
    assert planned(S3, machine, model=model).router.kv_block_size == 128, "vLLM's default on a CPU"
    sized = S3.replace('args: ["--model"', 'args: ["--block-size", "32", "--model"', 1)
    assert planned(sized, machine, model=model).router.kv_block_size == 32


def test_the_engines_template_settings_reach_the_router(
    model: Path, machine: Machine, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.touch()
    raw = yaml.safe_load(NVME)
    raw["spec"]["worker"]["args"] = [
        f"--tokenizer={model}",
        "--chat-template",
        str(template),
        "--default-chat-template-kwargs",
        '{"a": 1}',
        "--max-model-len=4k",
    ]
    router = planned(raw, machine, model=model).router
    assert (router.tokenizer, router.chat_template) == (str(model), str(template))
    assert (router.default_chat_template_kwargs, router.max_model_len) == ('{"a": 1}', 4000)


@pytest.mark.parametrize(
    ("limits", "planned_limits"),
    [
        (None, (None, 0, 429)),
        ({}, (None, 0, 429)),
        ({"maxConcurrentRequests": 64}, (64, 0, 429)),
        ({"maxConcurrentRequests": 64, "maxQueueSize": 16, "overflowStatusCode": 503}, (64, 16, 503)),
        ({"maxConcurrentRequests": 1, "maxQueueSize": 0, "overflowStatusCode": 400}, (1, 0, 400)),
    ],
)
def test_request_limits_reach_the_router(
    model: Path, machine: Machine, limits: dict[str, int] | None, planned_limits: tuple[int | None, int, int]
) -> None:
    raw = yaml.safe_load(NVME)
    raw["spec"]["worker"]["requestLimits"] = limits
    made = planned(raw, machine, model=model)
    router = made.router
    assert (
        router.max_concurrent_requests,
        router.max_queue_size,
        router.overflow_status_code,
    ) == planned_limits
    assert ("--max-concurrent-requests" in made.router_argv) is (planned_limits[0] is not None)
    assert not any("requestLimits" in text for text in (*made.notes, *made.unused_fields))


def test_a_queue_without_a_limit_is_noted(model: Path, machine: Machine) -> None:
    raw = yaml.safe_load(NVME)
    raw["spec"]["worker"]["requestLimits"] = {"maxQueueSize": 16}
    notes = planned(raw, machine, model=model).notes
    assert "spec.worker.requestLimits: without maxConcurrentRequests nothing is limited or queued" in notes


def test_the_limits_of_the_documented_manifest_are_those_that_the_page_tells(
    tmp_path: Path, machine: Machine
) -> None:
    model = model_folder(tmp_path / "model", max_position_embeddings=16_384)
    page = (Path(__file__).parents[2] / "docs" / "local.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    router = planned(text, machine, model=model).router
    assert router.max_concurrent_requests is not None
    served = router.max_concurrent_requests * len(router.decode)
    waiting = router.max_queue_size * len(router.decode)
    told = " ".join(page.split())
    assert f"{served} requests are served at once, {waiting} more wait" in told
    assert f"`overflowStatusCode` ({router.overflow_status_code})" in told


def test_with_a_tokenizer_that_lies_elsewhere_engines_count(model: Path, machine: Machine) -> None:
    """The model's own would give other counts."""
    raw = yaml.safe_load(NVME)
    raw["spec"]["worker"]["args"] = ["--tokenizer", "org/tokenizer"]
    plan = planned(raw, machine, model=model)
    assert (plan.router.tokenizer, plan.router.model_path) == (None, None)
    assert any("org/tokenizer" in note and "engines count" in note for note in plan.notes)


def test_the_builtin_model_is_prepared_with_a_word(
    machine: Machine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str]] = []
    told: list[str] = []

    def builtin_model(cache: Path, python: str, *, on_convert: Callable[[], None]) -> None:
        on_convert()
        asked.append((cache, python))

    monkeypatch.setattr(plan, "builtin_model", builtin_model)
    builtin = read_manifest(None)
    endpoint = builtin.endpoint
    made = make_plan(endpoint, builtin.raw, machine, "python", on_convert=lambda: told.append("converting"))
    assert asked == [(home / "models", machine.python)]
    assert made.model == builtin_folder(home / "models")
    assert told == ["converting"]
    assert endpoint.spec.model_source_config.hugging_face_model["modelId"] == MODEL_ID


def test_a_plan_to_look_at_converts_nothing_and_asks_for_no_port(machine: Machine, home: Path) -> None:
    builtin = read_manifest(None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = make_plan(builtin.endpoint, builtin.raw, machine, "python", port=port, dry=True)
    assert made.model.parent == home / "models"
    assert not made.model.exists()


def test_the_builtin_endpoint_is_the_example_and_uses_all_it_says() -> None:
    example = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
    builtin, written = read_manifest(None), read_manifest(example)
    assert (written.endpoint, written.raw) == (builtin.endpoint, builtin.raw)
    assert builtin.endpoint.spec.pd_spec is not None
    assert builtin.endpoint.spec.pd_spec.routing_threshold == 1024


# A manifest in which every field that is acted on has a value, and for each field another value.
FULL = yaml.safe_load(NVME)
FULL["spec"]["kubernetes"]["volumes"].insert(0, {"name": "other", "hostPath": {"path": "/other"}})
FULL["spec"]["modelSourceConfig"]["s3Storage"] = {"bucketName": "models", "region": "us-east-2"}
FULL["spec"]["worker"]["args"] = ["--seed", "1"]
FULL["spec"]["intelligentRoutingSpec"] = {"enabled": True, "routingStrategy": "roundrobin"}
FULL["spec"]["kvCacheSpec"] = {
    "enableL1Cache": True,
    "enableL2Cache": True,
    "l2CacheSpec": {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://cache:6379"},
}
CHANGES: dict[str, Any] = {
    "spec.modelName": "other",
    "spec.invocationEndpoint": "my/model",
    "spec.modelSourceConfig.modelSourceType": "s3",
    "spec.kubernetes.volumes[1]": {"name": "model-weights", "hostPath": {"path": "/nowhere"}},
    "spec.intelligentRoutingSpec.routingStrategy": "kvaware",
    "spec.kvCacheSpec.enableL1Cache": False,
    "spec.kvCacheSpec.enableL2Cache": False,
    "spec.kvCacheSpec.l2CacheSpec": {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://other:6379"},
    "spec.pdSpec.routingThreshold": 7,
    "spec.pdSpec.prefillSpec.replicas": 2,
    "spec.pdSpec.prefillSpec.args": ["--max-num-seqs", "3"],
    "spec.pdSpec.decodingSpec.replicas": 2,
    "spec.pdSpec.decodingSpec.args": ["--max-num-seqs", "3"],
    "spec.worker.args": ["--seed", "2"],
    "spec.worker.command": ["vllm", "serve", "--max-num-seqs", "3"],
    "spec.worker.environmentVariables": [{"name": "A", "value": "1"}],
    "spec.worker.modelVolumeMount": {"name": "other"},
    "spec.worker.requestLimits": {"maxConcurrentRequests": 5},
}


def with_value(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    place: Any = changed
    *above, last = path.replace("[1]", ".1").split(".")
    for part in above:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    place[int(last) if isinstance(place, list) else last] = value
    return changed


def outcome(raw: dict[str, Any], machine: Machine) -> Any:
    """The plan, or the refusal, without the list of what has no meaning."""
    try:
        return {**planned(raw, machine).as_dict(), "unusedFields": None}
    except (LocalError, EngineError) as error:
        return str(error)


@pytest.fixture
def full(model: Path) -> dict[str, Any]:
    raw = with_value(
        FULL, "spec.kubernetes.volumes[1]", {"name": "model-weights", "hostPath": {"path": str(model)}}
    )
    raw["spec"]["pdSpec"]["prefillSpec"]["replicas"] = 1
    return raw


@pytest.mark.parametrize("path", CHANGES)
def test_what_is_acted_on_changes_the_plan(full: dict[str, Any], machine: Machine, path: str) -> None:
    machine = replace(machine, lmcache="0.5.6")
    before = outcome(full, machine)
    assert isinstance(before, dict)
    assert outcome(with_value(full, path, CHANGES[path]), machine) != before


def test_what_is_told_to_be_acted_on_is_what_is_tried_here() -> None:
    names_only = {"apiVersion", "kind", "metadata", "spec.intelligentRoutingSpec.enabled"}
    by_builtin_model = {"spec.modelSourceConfig.huggingFaceModel.modelId"}
    assert CHANGES.keys() | names_only | by_builtin_model == ACTED_ON


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.instanceType", "ml.p5.48xlarge"),
        ("spec.loadBalancer", {"healthCheckPath": "/x"}),
        ("spec.kvCacheSpec.cacheConfigFile", "/etc/lmcache.yaml"),
        ("spec.kubernetes.schedulerName", "other"),
        ("spec.pdSpec.topologySpec", {"sameAZ": False}),
        ("spec.pdSpec.prefillSpec.nodeSelector", {"a": "b"}),
        ("spec.pdSpec.decodingSpec.resources", {"limits": {"nvidia.com/gpu": "1"}}),
        ("spec.worker.workingDir", "/tmp"),
        ("spec.worker.probes", {"livenessProbe": {"periodSeconds": 5}}),
    ],
)
def test_what_is_listed_changes_nothing(
    full: dict[str, Any], machine: Machine, path: str, value: Any
) -> None:
    changed = with_value(full, path, value)
    assert outcome(changed, machine) == outcome(full, machine)
    assert path in planned(changed, machine).unused_fields


def test_things_are_kept_where_xdg_says_or_all_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", "/t")
    assert (paths.model_cache(), paths.state("e")) == (Path("/t/models"), Path("/t/e"))
    monkeypatch.delenv("TANDEM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (paths.model_cache(), paths.state("e")) == (Path("/c/tandem/models"), Path("/s/tandem/e"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert paths.model_cache() == Path("/h/.cache/tandem/models")
    assert paths.state("e") == Path("/h/.local/state/tandem/e")


def test_engines_have_a_home_folder_where_the_user_has_none(
    model: Path, machine: Machine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would make one called `~` where it is started."""

    def homes() -> set[str | None]:
        return {(p.env or {}).get("HOME") for p in planned(S3, machine, model=model).processes[:-1]}

    monkeypatch.setenv("HOME", "/h")
    assert homes() == {"/h"}
    monkeypatch.delenv("HOME")

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert homes() == {str(home)}
