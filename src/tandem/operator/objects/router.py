"""The router's Deployment."""

from __future__ import annotations

from tandem.config import DECODING_PATH, router_argv
from tandem.operator import names, sizes
from tandem.operator.objects import config_maps
from tandem.operator.objects.common import (
    ROUTER_USER,
    Object,
    collector,
    config_hash,
    deployment_head,
    http_probe,
    locked,
    resources,
    scrape_annotations,
)
from tandem.operator.plan import Plan
from tandem.operator.routing import router_config
from tandem.operator.scaling import router_scaling
from tandem.operator.texts import literal
from tandem.operator.wishes import deploy_seconds

_API_KEYS = "tandem-api-keys"
_TOKEN = "kube-api-access"
_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where clients of the API look."""

_READY_SECONDS = 5
_COLLECTOR_FILE = "/etc/tandem/collector.yaml"


def deployment(plan: Plan, config: Object | None) -> Object:
    """`config` is the router's ConfigMap, if it has one."""
    selector = plan.names.router_selector()
    grace = sizes.grace(plan.times, 0, "", plan.router_leaves)
    annotations = {names.SIZES_ANNOTATION: f"{plan.times.reason}\n{grace.reason}\n"}
    scaling = router_scaling(plan)
    made = deployment_head(plan, plan.names.router, "router", annotations, 1, scaling, system=True)
    containers = [_router(plan)]
    if config is not None:
        mount = {
            "name": "tandem-config",
            "mountPath": _COLLECTOR_FILE,
            "subPath": config_maps.COLLECTOR,
            "readOnly": True,
        }
        # Ended at once it would take the whole pod's readiness with it, and no request would come any more.
        # Its image has no `sleep`; Kubernetes has, from 1.30 on.
        stays = {"preStop": {"sleep": {"seconds": plan.router_leaves}}}
        containers.append(collector(plan, mount, _COLLECTOR_FILE) | {"lifecycle": stays})
    pod: Object = {
        "serviceAccountName": plan.names.router,
        "automountServiceAccountToken": False,  # mounted below, for the router alone
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace.total,
        "containers": containers,
        "volumes": [{"name": "tandem-tmp", "emptyDir": {}}, _token()],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector},
            }
        ],
    }
    if plan.api_keys_secret is not None:
        pod["volumes"].append(_api_keys(plan.api_keys_secret))
    template: Object = {"labels": plan.names.labels("router") | selector}
    if config is not None:
        pod["volumes"].append({"name": "tandem-config", "configMap": {"name": plan.names.router}})
        template["annotations"] = {names.CONFIG_ANNOTATION: config_hash([config]), **scrape_annotations()}
    return made | {
        "spec": {
            **made["spec"],
            "revisionHistoryLimit": 3,
            # It is not ready before its engines are.
            "progressDeadlineSeconds": sizes.deadline(deploy_seconds(plan.spec)),
            "strategy": _strategy(plan),
            "selector": {"matchLabels": selector},
            "template": {"metadata": template, "spec": pod},
        }
    }


def _strategy(plan: Plan) -> Object:
    """A new router is ready before the old one leaves; but LMCache's prefillers notify one router alone."""
    if plan.lmcache_pd:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def _readiness(plan: Plan) -> Object:
    """A router that leaves says no from then on. Where it is the only one, requests go to it as long as its
    probe has not failed so often: until it takes none any more.

    With LMCache prefillers have to reach the router before it can prove that one of them works; and it has to
    be known to leave well before it is gone (see `notify_service`)."""
    path = DECODING_PATH if plan.lmcache_pd else "/ready"
    patience = 2 if plan.lmcache_pd else 1 + plan.router_leaves // _READY_SECONDS
    seconds = {"periodSeconds": _READY_SECONDS, "timeoutSeconds": 5}
    return http_probe(path, names.ROUTER_PORT, **seconds, failureThreshold=patience)


def _router(plan: Plan) -> Object:
    ports = [{"name": "http", "containerPort": names.ROUTER_PORT}]
    if plan.lmcache_pd:
        ports.append({"name": "notify", "containerPort": names.NOTIFY_PORT})
    mounts = [
        {"name": "tandem-tmp", "mountPath": "/tmp"},
        {"name": _TOKEN, "mountPath": _TOKEN_FOLDER, "readOnly": True},
    ]
    if plan.api_keys_secret is not None:  # the folder: a file that is mounted by itself is never updated
        mounts.append({"name": _API_KEYS, "mountPath": names.API_KEYS_FOLDER, "readOnly": True})
    return {
        "name": names.ROUTER_CONTAINER,
        "image": plan.settings.router_image,
        "command": ["tandem", "router"],
        "args": [literal(word) for word in router_argv(router_config(plan))],
        "ports": ports,
        "startupProbe": http_probe("/health", names.ROUTER_PORT, periodSeconds=2, failureThreshold=60),
        "readinessProbe": _readiness(plan),
        "livenessProbe": http_probe(
            "/health", names.ROUTER_PORT, periodSeconds=15, timeoutSeconds=5, failureThreshold=4
        ),
        "resources": resources("1", "1Gi", "4", "4Gi"),
        "securityContext": locked(ROUTER_USER),
        "volumeMounts": mounts,
    }


def _api_keys(secret: str) -> Object:
    """Of the Secret only the file of keys: an endpoint's author may name any Secret of this namespace, and
    others have no such file. The pod waits until it is there."""
    items = [{"key": names.API_KEYS_FILE, "path": names.API_KEYS_FILE}]
    return {"name": _API_KEYS, "secret": {"secretName": secret, "items": items}}


def _token() -> Object:
    """What Kubernetes would mount into every container of the pod: the account's token, by which the router
    watches the pods of its engines, the API server's certificate, and the namespace. The collector beside it
    needs none of them."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    authority = {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": authority},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": _TOKEN, "projected": {"sources": sources}}
