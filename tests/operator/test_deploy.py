"""The manifests by which the operator is installed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api.crd import NAME, crd
from tandem.api.crd.definition import LABELS
from tandem.kube import Resource, resource_of
from tandem.kube import resources as kinds
from tandem.operator.control.watches import ENDPOINT, OWNED
from tandem.operator.names import WEBHOOK
from tandem.operator.process.alone import HYPERPOD_DEPLOYMENT
from tandem.operator.process.run import LEASE, OperatorConfig
from tandem.operator.webhooks.trust import VALIDATE_PATH

from .endpoints import VARIANTS, rendered

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONFIG = OperatorConfig()
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def installed() -> list[dict[str, Any]]:
    files = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text("utf-8"))["resources"]
    return [
        o for name in files for o in yaml.load_all((DEPLOY / name).read_text("utf-8"), Loader=LOADER) if o
    ]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in installed() if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def rights() -> list[dict[str, Any]]:
    return [rule for o in installed() if o["kind"] in ("ClusterRole", "Role") for rule in o["rules"]]


def may(resource: Resource, verb: str) -> bool:
    return any(
        resource.group in rule["apiGroups"]
        and resource.plural in rule["resources"]
        and verb in rule["verbs"]
        and "resourceNames" not in rule
        for rule in rights()
    )


def test_the_definition_is_what_tandem_crd_prints() -> None:
    """If this fails: tandem crd > deploy/crd.yaml"""
    assert one("CustomResourceDefinition", NAME) == crd()


def test_it_may_be_applied_over_what_the_operator_has_written() -> None:
    """The conversion and the certificates are the operator's: an applied file that named them would fight."""
    assert "conversion" not in one("CustomResourceDefinition", NAME)["spec"]
    for webhook in one("ValidatingWebhookConfiguration", WEBHOOK)["webhooks"]:
        assert "caBundle" not in webhook["clientConfig"]


def test_no_right_has_a_star() -> None:
    for rule in rights():
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


@pytest.mark.parametrize("resource", OWNED, ids=lambda resource: resource.plural)
def test_what_endpoints_become_may_be_made_and_removed(resource: Resource) -> None:
    for verb in ("get", "list", "watch", "create", "patch", "delete"):
        assert may(resource, verb), verb


def test_every_kind_that_is_rendered_is_watched() -> None:
    made = {resource_of(o) for variant in VARIANTS.values() for o in rendered(*variant).objects}
    assert made <= set(OWNED)


def test_of_endpoints_only_metadata_and_status_may_be_written() -> None:
    assert {verb for verb in ("create", "update", "delete") if may(ENDPOINT, verb)} == set()
    assert may(ENDPOINT, "patch")


def test_logs_may_be_read_and_nothing_run_in_pods() -> None:
    of_pods = {
        (what, verb)
        for rule in rights()
        for what in rule["resources"]
        for verb in rule["verbs"]
        if what.startswith("pods/")
    }
    assert of_pods == {("pods/log", "get")}


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        (kinds.LEASE, LEASE),
        (kinds.SECRET, CONFIG.webhook_secret),
        (kinds.DEFINITION, NAME),
        (kinds.VALIDATING_WEBHOOK, WEBHOOK),
    ],
)
def test_of_these_one_by_name_may_be_read_and_written(resource: Resource, name: str) -> None:
    (rule,) = [r for r in rights() if resource.plural in r["resources"] and "resourceNames" in r]
    assert rule["resourceNames"] == [name]
    assert {"update", "patch"} & set(rule["verbs"])
    assert "get" in rule["verbs"]
    assert not may(resource, "get")


@pytest.mark.parametrize("resource", [kinds.LEASE, kinds.VALIDATING_WEBHOOK])
def test_what_others_write_is_watched_by_name(resource: Resource) -> None:
    (rule,) = [r for r in rights() if resource.plural in r["resources"] and "resourceNames" in r]
    assert {"list", "watch"} <= set(rule["verbs"])


def test_it_is_named_as_hyperpods_so_that_its_guide_finds_it() -> None:
    deployment = one("Deployment", HYPERPOD_DEPLOYMENT)
    assert deployment["metadata"]["namespace"] == CONFIG.settings.system_namespace
    assert LABELS.items() <= deployment["metadata"]["labels"].items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "manager"
    assert container["command"] == ["tandem", "operator"]


def test_ports_and_services_fit_together() -> None:
    deployment = one("Deployment", HYPERPOD_DEPLOYMENT)
    pod = deployment["spec"]["template"]
    ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
    assert ports == {
        "health": CONFIG.health_port,
        "metrics": CONFIG.metrics_port,
        "webhook": CONFIG.webhook_port,
    }
    service = one("Service", CONFIG.webhook_service)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (webhook,) = one("ValidatingWebhookConfiguration", WEBHOOK)["webhooks"]
    where = webhook["clientConfig"]["service"]
    assert (where["name"], where["path"]) == (CONFIG.webhook_service, VALIDATE_PATH)


def test_it_runs_without_root_privileges_and_a_writable_root() -> None:
    spec = one("Deployment", HYPERPOD_DEPLOYMENT)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"requests", "limits"} <= container["resources"].keys()
    assert {"readinessProbe", "livenessProbe", "startupProbe"} <= container.keys()
