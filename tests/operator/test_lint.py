"""What a reviewer of manifests asks of every object, in the way of kube-linter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tandem.operator import Settings
from tandem.operator.sizes import DRAIN_DELAY

from .endpoints import ROUTER_NAMESPACE, SETTINGS, VARIANTS, of_kind, rendered

OURS = frozenset(
    {
        "sidecar-reverse-proxy",
        "otel-collector",
        "router-container",
        "hf-model-downloader",
        "model-weights-copier",
    }
)
UNLIMITED = frozenset({"model-weights-copier"})
"""Whose memory is not limited, as it fills the pod's own."""


def pods(variant: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for made in of_kind(rendered(*VARIANTS[variant]), "Deployment"):
        yield made["metadata"]["name"], made["spec"]["template"]["spec"]


def containers(variant: str) -> Iterator[dict[str, Any]]:
    """All that Tandem writes; not the resource's own init containers."""
    for name, of_pod in pods(variant):
        yield from (c for c in of_pod.get("initContainers", ()) if c["name"] in OURS)
        for found in of_pod["containers"]:
            assert found["name"] in OURS or found["name"] == name
            yield found


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_have_no_root_and_no_privileges(variant: str) -> None:
    for found in containers(variant):
        context = found["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_model_containers_may_be_let_run_as_their_image_says() -> None:
    settings = Settings(workers_as_root=True)
    made = rendered("dpd-s3", settings=settings)
    for found in of_kind(made, "Deployment"):
        for c in found["spec"]["template"]["spec"]["containers"]:
            assert ("runAsUser" in c["securityContext"]) is (c["name"] in OURS)
            assert c["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_say_what_they_need_and_ours_what_they_take_at_most(variant: str) -> None:
    for found in containers(variant):
        needs = found["resources"]
        assert {"cpu", "memory"} <= needs["requests"].keys() | needs.get("limits", {}).keys()
        if found["name"] in OURS:
            assert "cpu" in needs["limits"]
            assert "memory" in needs["limits"] or found["name"] in UNLIMITED
        for name, amount in needs.get("limits", {}).items():
            if "/" in name or name.startswith("hugepages"):  # cannot be overcommitted
                assert needs["requests"].get(name, amount) == amount


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_are_probed(variant: str) -> None:
    for name, of_pod in pods(variant):
        for found in of_pod["containers"]:
            assert "livenessProbe" in found, (name, found["name"])
            # A collector in trouble is no reason to take its pod out of use.
            assert ("readinessProbe" in found) is (found["name"] != "otel-collector")
            ports = {p["containerPort"] for p in found.get("ports", ())} | {13133}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                if probe in found:
                    assert found[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sidecar_is_ready_before_the_engine_is(variant: str) -> None:
    """`2/3` says that the engine is loading: the proxy's probe does not ask the engine."""
    for _, of_pod in pods(variant):
        for found in of_pod["containers"]:
            if found["name"] == "sidecar-reverse-proxy":
                assert found["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": 9113}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_no_variables_of_services_and_the_router_alone_a_token(variant: str) -> None:
    for made in of_kind(rendered(*VARIANTS[variant]), "Deployment"):
        of_pod = made["spec"]["template"]["spec"]
        router = made["metadata"]["labels"]["tandem.dev/component"] == "router"
        assert of_pod["automountServiceAccountToken"] is False
        with_token = [
            found["name"]
            for found in of_pod["containers"]
            for mount in found["volumeMounts"]
            if mount["mountPath"].startswith("/var/run/secrets")
        ]
        assert with_token == (["router-container"] if router else []), "its collector needs none"
        assert of_pod["enableServiceLinks"] is False
        assert of_pod["serviceAccountName"]
    for account in of_kind(rendered(*VARIANTS[variant]), "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False, "other pods with this account get none"


@pytest.mark.parametrize("variant", VARIANTS)
def test_rights_are_those_of_the_router_to_see_pods(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    roles, bindings = of_kind(made, "Role"), of_kind(made, "RoleBinding")
    assert not [o["kind"] for o in made.objects if o["kind"].startswith("ClusterRole")]
    routers = [a for a in of_kind(made, "ServiceAccount") if a["metadata"]["namespace"] == ROUTER_NAMESPACE]
    assert len(roles) == len(bindings) == len(routers)
    for role, binding, account in zip(roles, bindings, routers, strict=True):
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        ]
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "team-a"
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], ROUTER_NAMESPACE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_container_mounts_is_there(variant: str) -> None:
    for _, of_pod in pods(variant):
        volumes = [v["name"] for v in of_pod["volumes"]]
        assert len(volumes) == len(set(volumes))
        for found in (*of_pod.get("initContainers", ()), *of_pod["containers"]):
            mounts = found.get("volumeMounts", ())
            assert {m["name"] for m in mounts} <= set(volumes)
            assert len({m["mountPath"] for m in mounts}) == len(mounts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_pod_refers_to_is_rendered(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    there = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]): o for o in made.objects}
    for found in of_kind(made, "Deployment"):
        namespace = found["metadata"]["namespace"]
        of_pod = found["spec"]["template"]["spec"]
        account = of_pod["serviceAccountName"]
        assert account == "models" or ("ServiceAccount", namespace, account) in there
        for volume in of_pod["volumes"]:
            if "configMap" in volume:
                data = there["ConfigMap", namespace, volume["configMap"]["name"]]["data"]
                assert {item["key"] for item in volume["configMap"].get("items", ())} <= data.keys()
            if "persistentVolumeClaim" in volume:
                claim = there[
                    "PersistentVolumeClaim", namespace, volume["persistentVolumeClaim"]["claimName"]
                ]
                assert ("PersistentVolume", None, claim["spec"]["volumeName"]) in there


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_find_the_pods(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    pods_by_namespace = [
        (d["metadata"]["namespace"], d["spec"]["template"]["metadata"]["labels"])
        for d in of_kind(made, "Deployment")
    ]

    def found(namespace: str, labels: dict[str, str]) -> int:
        return sum(labels.items() <= own.items() for there, own in pods_by_namespace if there == namespace)

    for o in made.objects:
        match o["kind"]:
            case "Service":
                assert found(o["metadata"]["namespace"], o["spec"]["selector"]) == 1
            case "Deployment" | "PodDisruptionBudget":
                assert found(o["metadata"]["namespace"], o["spec"]["selector"]["matchLabels"]) == 1
            case "NetworkPolicy":
                assert found(o["metadata"]["namespace"], o["spec"]["podSelector"]["matchLabels"]) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_deployment_has_its_policy_and_a_budget_that_blocks_no_node(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    for kind, selector in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        chosen = [(o["metadata"]["namespace"], o["spec"][selector]) for o in of_kind(made, kind)]
        pods_of = [(d["metadata"]["namespace"], d["spec"]["selector"]) for d in of_kind(made, "Deployment")]
        assert chosen == pods_of
    for budget in of_kind(made, "PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize("variant", VARIANTS)
def test_services_lead_to_ports_that_pods_have(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    for service in of_kind(made, "Service"):
        for d in of_kind(made, "Deployment"):
            labels = d["spec"]["template"]["metadata"]["labels"]
            if service["spec"]["selector"].items() <= labels.items():
                ports = [p for c in d["spec"]["template"]["spec"]["containers"] for p in c.get("ports", ())]
                assert {p["targetPort"] for p in service["spec"]["ports"]} <= {p["name"] for p in ports}
                assert len({p["name"] for p in ports}) == len(ports)
                assert all(len(p["name"]) <= 15 for p in ports)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_configuration_makes_new_pods(variant: str) -> None:
    """By a hash in the pods' annotations; mounted single files are never brought up to date in a pod."""
    name, changes = VARIANTS[variant]
    limits = {"maxConcurrentRequests": 7}
    seen = []
    for limit in ({}, {"spec.worker.requestLimits": limits}):
        made = rendered(name, {**changes, **limit})
        answering = next(
            d
            for d in of_kind(made, "Deployment")
            if d["metadata"]["labels"]["tandem.dev/component"] in ("decode", "worker")
        )
        seen.append(answering["spec"]["template"]["metadata"]["annotations"]["tandem.dev/config-hash"])
    assert seen[0] != seen[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_are_plain_and_small(variant: str) -> None:
    for o in rendered(*VARIANTS[variant]).objects:
        assert json.loads(json.dumps(o)) == o
        assert len(json.dumps(o)) < 100_000


@pytest.mark.parametrize("variant", VARIANTS)
def test_secrets_are_referred_to_and_never_written_down(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    assert not of_kind(made, "Secret")
    if VARIANTS[variant][0] in ("dpd-huggingface", "dpd-nixl"):
        for d in of_kind(made, "Deployment"):
            for c in d["spec"]["template"]["spec"]["containers"]:  # init containers alone get the token
                assert "HF_TOKEN" not in {v["name"] for v in c.get("env", ())}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_end_in_order(variant: str) -> None:
    """Forgotten, drained, ended: both containers of a model pod wait, and the pod is given the time."""
    for name, of_pod in pods(variant):
        for found in of_pod["containers"]:
            if found["name"] == name:
                words = found["lifecycle"]["preStop"]["exec"]["command"][2].split()
                seconds = [float(words[words.index(f"--{w}") + 1]) for w in ("leave", "limit", "linger")]
                assert of_pod["terminationGracePeriodSeconds"] >= sum(seconds) + 30
            if found["name"] == "sidecar-reverse-proxy":
                command, leave = found["lifecycle"]["preStop"]["exec"]["command"]
                assert (command, float(leave)) == ("sleep", DRAIN_DELAY)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rollout_takes_no_pod_before_the_last_one_is_known(variant: str) -> None:
    """A router has to hear of a pod, and proves it before it is used."""
    for made in of_kind(rendered(*VARIANTS[variant]), "Deployment"):
        if made["metadata"]["labels"]["tandem.dev/component"] != "router":
            assert made["spec"]["minReadySeconds"] >= DRAIN_DELAY


def test_images_are_the_settings() -> None:
    images = {c["image"] for c in containers("dpd-s3")}
    assert images == {
        "lmcache/vllm-openai:v0.4.3",
        SETTINGS.router_image,
        SETTINGS.proxy_image,
        SETTINGS.collector_image,
    }


def test_defaults_name_a_version_for_every_image() -> None:
    made = rendered("dpd-s3", settings=Settings())
    for d in of_kind(made, "Deployment"):
        for c in d["spec"]["template"]["spec"]["containers"]:
            tag = c["image"].rpartition(":")[2]
            assert tag not in ("", "latest")
            assert "/" not in tag


@pytest.mark.parametrize("variant", VARIANTS)
def test_configurations_are_yaml_where_they_say_so(variant: str) -> None:
    for config in of_kind(rendered(*VARIANTS[variant]), "ConfigMap"):
        for key, text in config["data"].items():
            if key.endswith(".yaml"):
                assert isinstance(yaml.safe_load(text), dict)
