"""What `validate` says and what `render` does are one: no error, and there are objects; an error, and there
are none, but for what only Kubernetes, vLLM or HyperPod would refuse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.api import InvalidResource, read_endpoint
from tandem.api.conventions import is_plain_path
from tandem.api.crd import spec_and_status
from tandem.api.crd.schemas import fields
from tandem.api.validation import read_manifest
from tandem.config.values import request_path
from tandem.engine.pod_ports import taken_ports
from tandem.engine.validation import validate
from tandem.operator import RenderError, Rendering, Settings, render
from tandem.operator.control.desired import desired

from ..api.asking import asked
from ..api.conftest import ApiServer
from .endpoints import VARIANTS, changed, planned, pod, rendered

CORPUS = sorted((Path(__file__).parents[1] / "api/corpus").glob("*.yaml"))

OTHERS_REFUSE = {
    "IEC222": "Kubernetes: names of a pod's volumes and containers are given once",
    "IEC223": "Kubernetes: a mount names a volume of the pod",
    "IEC224": "Kubernetes: a volume has one source",
    "IEC225": "Kubernetes: names of volumes and containers are DNS labels",
    "IEC226": "Kubernetes: amounts, but for GPUs and EFA interfaces, which are counted here",
    "IEC227": "Kubernetes: a probe has one handler",
    "IEC228": "Kubernetes: a variable has one source",
    "IEC230": "Kubernetes and the drivers: names that are empty, but for a bucket's and a file system's",
    "IEC231": "KEDA: a trigger without its metric, also where nothing is scaled by it",
    "IEC232": "the engine: PYTHONHASHSEED, which Python reads",
    "IEC233": "Kubernetes and the drivers: an image, a path or a bucket that cannot be",
    "IEC234": "Kubernetes: the model's volume has the name of another",
    "IEC401": "vLLM: values that it does not take, but for numbers that are read here",
    "IEC402": "vLLM: a flag without its value",
    "IEC403": "vLLM: flag and value in one word",
    "IEC404": "vLLM: flags that do not go together",
    "IEC405": "vLLM: fewer GPUs than ranks",
    "IEC406": "vLLM: roles whose KV differs, which nothing rendered shows",
    "IEC407": "the router finds no engine on another port",
    "IEC408": "the router finds no engine behind a socket or TLS",
    "IEC409": "LMCache: its modes, for which Tandem's own stands in what is rendered",
}
"""Errors with which objects can still be made, and who refuses what comes of them."""

BARE = Settings(router_image="registry.example/tandem/router:1.0")
WITH_REGION = Settings(router_image="registry.example/tandem/router:1.0", region="us-east-2")


def outcome(resource: Any, settings: Settings = WITH_REGION) -> Rendering | list[str]:
    """What comes of a resource, or why nothing does. Nothing else may be raised."""
    try:
        return render(read_endpoint(resource), settings)
    except InvalidResource as error:
        return [str(problem) for problem in error.problems]
    except RenderError as error:
        return [str(error)]


def assert_one(resource: Any) -> None:
    report = validate(resource)
    made = outcome(resource)
    if isinstance(made, Rendering):
        assert [str(f) for f in report.errors if f.rule not in OTHERS_REFUSE] == []
    else:
        assert report.errors, made
        told = {f.path for f in report.errors}
        assert any(near(path, told) for path in map(path_of, made)), (made, told)


def path_of(said: str) -> str:
    return said.partition(": ")[0]


FLAGS_OF = ("spec.worker.args", "spec.worker.command", "spec.pdSpec")
"""Fields that hold flags. What is read is what they come to together, whichever is to blame."""


def near(path: str, told: set[str]) -> bool:
    """Whether a mistake is told at this place, or where the value comes from that is read there."""
    if path.startswith(("spec.worker.args", "spec.pdSpec")):
        return any(other.startswith(FLAGS_OF) for other in told)
    if path.startswith("spec.worker.environmentVariables["):
        return any("nvironmentVariables" in other or "-env" in other for other in told)
    return any(path.startswith(other) or other.startswith(path) for other in told)


def resources_of(file: Path) -> list[Any]:
    manifest = read_manifest(file.read_text("utf-8"), file.name)
    return [document.resource for document in manifest.documents]


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_what_is_said_of_a_manifest_is_what_comes_of_it(file: Path) -> None:
    for resource in resources_of(file):
        assert_one(resource)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_valid_and_rendered(variant: str) -> None:
    resource = changed(*VARIANTS[variant])
    assert validate(resource).errors == ()
    assert isinstance(outcome(resource), Rendering)


ALONE: dict[str, dict[str, Any]] = {
    "IEC231": {"spec.intelligentRoutingSpec.autoScalingSpec": {"cloudWatchTrigger": {"namespace": "a"}}},
    "IEC232": {"spec.worker.environmentVariables": [{"name": "PYTHONHASHSEED", "value": "some"}]},
    "IEC401": {"spec.pdSpec.decodingSpec.args": ["--gpu-memory-utilization", "90"]},
    "IEC402": {"spec.pdSpec.decodingSpec.args": ["--dtype"]},
    "IEC406": {"spec.pdSpec.decodingSpec.args": ["--dtype", "half"]},
}
"""Those that stand beside others in the corpus."""


def test_every_exception_is_one() -> None:
    """Each of these errors is of a manifest that can be rendered, alone."""
    several = [resources_of(file) for file in CORPUS if file.stem.startswith("only-")]
    tried = [resource for found in several for resource in found]
    tried += [changed("dpd-s3", changes) for changes in ALONE.values()]
    rendered: set[str] = set()
    for resource in tried:
        if isinstance(outcome(resource), Rendering):
            rendered |= {finding.rule for finding in validate(resource).errors}
    assert rendered == set(OTHERS_REFUSE)


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_a_region_that_is_needed_is_a_warning(file: Path) -> None:
    """It is the one setting without which nothing can be made of a resource that has no error."""
    for resource in resources_of(file):
        report = validate(resource)
        needed = any(f.rule == "IEC724" for f in report.warnings)
        if report.ok:
            made = outcome(resource, BARE)
            assert isinstance(made, Rendering) != needed
            assert isinstance(made, Rendering) or "--region" in made[0]


GOOD = [
    resource for file in CORPUS if file.stem.startswith(("good-", "warn-")) for resource in resources_of(file)
]
GOOD += [changed(*variant) for variant in VARIANTS.values()]
PATHS = [tuple(path.split(".")) for path, _, _ in fields(spec_and_status()) if path.startswith("spec.")]
LISTS = [
    ("spec", "worker", "args"),
    ("spec", "pdSpec", "prefillSpec", "args"),
    ("spec", "pdSpec", "decodingSpec", "args"),
]
AMOUNTS = [
    ("spec", *below, "resources", part, name)
    for below in (("worker",), ("pdSpec", "prefillSpec"), ("pdSpec", "decodingSpec"))
    for part in ("limits", "requests")
    for name in ("nvidia.com/gpu", "vpc.amazonaws.com/efa", "memory")
]
ODD = [
    None, True, False, 0, -1, 1, 3, 2.0, 2.5, 43, 44, 100, 101, 2**31 - 1, 2**31, 2**63, 1e300,
    "", " ", "0", "-1", "8", "8k", "8Ki", "500m", "8.5", "1e1.5", "1e99", "+8", "eight", "auto", "true",
    "/", "//", "/a b", "/..", "a/b", "*", "$(A)", "$(", "$$", "%", "{", "[1]", '{"a": 1}', "\n", "é",
    "http://[", "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-1", "redis", "s3://b/c",
    "shm", "null", "x" * 300,
]  # fmt: skip
FLAGS = [
    "--max-model-len", "--max-num-batched-tokens", "--tensor-parallel-size", "-tp", "-pp", "-dp", "serve",
    "--kv-events-config", "--kv-transfer-config", "--served-model-name", "--model", "--tokenizer", "--port",
    "--chat-template", "--default-chat-template-kwargs", "--no-enable-prefix-caching", "--kv-cache-dtype",
    "--block-size",
]  # fmt: skip
words = st.sampled_from(FLAGS) | st.sampled_from([odd for odd in ODD if isinstance(odd, str)])
ANNOTATIONS = [
    "connector",
    "managed",
    "prefill-env",
    "decode-env",
    "decode-image",
    "prefill-volumes",
    "router-env",
]
VARIABLES = [
    f'[{{"name": "PD_BUFFER_SIZE", "value": {value}}}]'
    for value in ('"0"', '"1"', '"007"', '"8589934592"', '"8Gi"', '"$(A)"', "null", '"99999999999999999999"')
]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A good manifest with odd values in a few places."""
    resource = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.sampled_from(["field", "amount", "flags", "annotation"])):
            case "field":
                put(resource, draw(st.sampled_from(PATHS)), draw(st.sampled_from(ODD)))
            case "amount":
                put(resource, draw(st.sampled_from(AMOUNTS)), draw(st.sampled_from(ODD)))
            case "flags":
                put(resource, draw(st.sampled_from(LISTS)), draw(st.lists(words, max_size=5)))
            case _:
                key = f"tandem.dev/{draw(st.sampled_from(ANNOTATIONS))}"
                put(resource, ("metadata", "annotations", key), draw(st.sampled_from([*VARIABLES, *ODD])))
    return resource


def put(resource: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a field; `name[]` is the first item of a list. What it lies in is made where it is missing."""
    place: Any = resource
    for part in path[:-1]:
        name = part.removesuffix("[]")
        if name != part:
            if not (isinstance(place.get(name), list) and place[name] and isinstance(place[name][0], dict)):
                place[name] = [{}]
            place = place[name][0]
        else:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
    last = path[-1].removesuffix("[]")
    place[last] = value if last == path[-1] else [value]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_whatever_is_in_its_fields_what_is_said_is_what_comes_of_it(resource: Any) -> None:
    assert_one(resource)


def test_a_stored_object_becomes_what_its_manifest_does(api_server: ApiServer) -> None:
    """Whatever defaults the API server has filled in."""
    manifests = [r for r in GOOD if r["apiVersion"].endswith("/v1")]
    manifests = [
        copy.deepcopy(r) for r in manifests if "name" in r["metadata"]
    ]  # others get one of their own
    for resource in manifests:
        resource["metadata"]["namespace"] = "default"  # which is there
    stored = asked(api_server, manifests)
    assert len(stored) == len(manifests) > 80
    for i, resource in enumerate(manifests):
        assert render_objects(stored[i]) == render_objects(resource), resource["metadata"]["name"]


@given(st.text(alphabet="/.~_-aZ9 *%?#;{}\n\u00e9", max_size=8) | st.text(max_size=5))
def test_the_router_takes_every_path_that_validation_takes(text: str) -> None:
    """An Ingress takes fewer: none with `//` or parts that lead elsewhere."""
    try:
        request_path(text)
    except ValueError:
        assert not is_plain_path(text)
    else:
        leads_elsewhere = "//" in text or {".", ".."} & set(text.split("/"))
        assert is_plain_path(text) is not bool(leads_elsewhere)


@pytest.mark.parametrize(
    ("name", "changes", "ports"),
    [
        ("dpd-s3", {}, {5600, 7300, 7307, 7400, 7407, 8081, 8889, 9113, 13133}),
        ("dpd-nixl", {}, {5600, 8081, 8889, 9113, 13133}),
        (
            "dpd-nixl",
            {
                "spec.intelligentRoutingSpec": {"routingStrategy": "kvaware"},
                "spec.worker.args": ["--tensor-parallel-size", "4", "-dp", "2"],
            },
            {5557, 5558, 5600, 5601, 6557, 6558, 8081, 8889, 9113, 13133},
        ),
        ("colocated-routing", {}, {5600, 8081, 8889, 9113, 13133}),
    ],
)
def test_the_engines_port_is_none_that_its_pod_has(
    name: str, changes: dict[str, Any], ports: set[int]
) -> None:
    path = "spec.worker.modelInvocationPort.containerPort"
    tried = ports | {port + 1 for port in ports} | {5557, 6557, 7300, 7400, 8000}
    found = set()
    for port in tried:
        resource = changed(name, {**changes, path: port})
        resource["spec"]["worker"]["args"] = [
            word if word != "8000" else str(port) for word in resource["spec"]["worker"]["args"]
        ]
        assert_one(resource)
        if not isinstance(outcome(resource), Rendering):
            found.add(port)
            assert ("IEC229", path) in [(f.rule, f.path) for f in validate(resource).errors]
    between = {port for port in tried if 7300 < port < 7308 or 7400 < port < 7408}
    assert found - between == ports - between


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_listens_beside_an_engine_is_known(variant: str) -> None:
    made = planned(*VARIANTS[variant])
    ranks = {"tp": max(p.flags.tp for p in made.pools), "dp": max(p.flags.dp for p in made.pools)}
    known = taken_ports(lmcache=made.lmcache_pd, kv_events=made.kv_events, **ranks)
    for role in (pool.role for pool in made.pools):
        ports = [
            port for c in pod(rendered(*VARIANTS[variant]), role)["containers"] for port in c.get("ports", ())
        ]
        beside = {port["containerPort"] for port in ports} - {made.port}
        assert beside <= known.keys()


def test_amounts_that_are_no_devices_are_told_with_their_field() -> None:
    """The schema takes all of these, and Kubernetes none."""
    for amount in ("8.5", "500m", "1e1.5", "-8", "1e99"):
        resource = changed(
            "dpd-s3", {"spec.pdSpec.prefillSpec.resources": {"limits": {"nvidia.com/gpu": amount}}}
        )
        path = "spec.pdSpec.prefillSpec.resources.limits.nvidia.com/gpu"
        assert [f.path for f in validate(resource).errors] == [path]
        made = outcome(resource)
        assert isinstance(made, list)
        assert made[0].startswith(f"{path}: ")


def test_a_manifest_that_is_written_with_nulls_and_fractions_is_rendered_as_without() -> None:
    """As the API server stores it."""
    plain = changed("dpd-s3", {})
    odd = changed(
        "dpd-s3",
        {
            "spec.pdSpec.routingThreshold": float(plain["spec"]["pdSpec"].get("routingThreshold", 4096)),
            "spec.pdSpec.topologySpec": None,
            "spec.kvCacheSpec.enableL1Cache": None,
            "spec.metrics.metricsScrapeIntervalSeconds": 15.0,
            "spec.worker.probes": {"livenessProbe": None},
            "spec.worker.requestLimits": None,
        },
    )
    assert yaml.safe_dump(render_objects(odd)) == yaml.safe_dump(render_objects(plain))


def render_objects(resource: Any) -> list[Any]:
    made = outcome(resource)
    assert isinstance(made, Rendering), made
    return list(made.objects)


def test_the_condition_tells_nothing_of_what_is_well() -> None:
    quiet = changed("dpd-nvme", {"spec.worker.resources": {}, "spec.worker.environmentVariables": ...})
    assert desired(as_stored(quiet), WITH_REGION).outcome.warnings == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec.worker.command": ["bash", "-c", 'exec vllm serve "$@"']}, "spec.worker.command: "),
        (
            {"spec.worker.environmentVariables": [{"name": "PD_BUFFER_SIZE", "value": "99999999"}]},
            "chunks of",
        ),
        (
            {"spec.kvCacheSpec": {"enableL2Cache": True, "l2CacheSpec": {"l2CacheBackend": "tieredstorage"}}},
            "tieredstorage",
        ),
        ({"spec.intelligentRoutingSpec.autoScalingSpec": {"maxReplicaCount": 3}}, "autoScalingSpec: "),
        ({"spec.pdSpec.autoScalingSpec": {"prefillAutoScaling": {}}}, "prefillAutoScaling: "),
    ],
)
def test_the_condition_tells_each_thing_once(changes: dict[str, Any], words: str) -> None:
    warnings = desired(as_stored(changed("dpd-s3", changes)), WITH_REGION).outcome.warnings
    assert sum(words in said for said in warnings) == 1, warnings


def as_stored(resource: dict[str, Any]) -> dict[str, Any]:
    return resource | {"metadata": resource["metadata"] | {"uid": "1"}}
