"""Deployments of model pods: engine, reverse proxy, metrics collector."""

from __future__ import annotations

from tandem.api import Role, conventions
from tandem.api.quantities import EFA, HUGE_PAGES
from tandem.operator import engines, model_files, names, sizes, weights
from tandem.operator.kv_layout import kv_layout
from tandem.operator.objects import config_maps
from tandem.operator.objects.common import (
    MODEL_USER,
    PROXY_USER,
    Object,
    collector,
    config_hash,
    deployment_head,
    http_probe,
    locked,
    resources,
    scrape_annotations,
)
from tandem.operator.placement import affinity, tolerations
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.wishes import deploy_seconds, section

_CONFIG = "/etc/tandem"

# nginx ends at once on SIGTERM, answers and all; on SIGQUIT it finishes them. A signal ends the first wait.
_PROXY_COMMAND = """\
nginx -c "$1" -g "daemon off;" &
trap "kill -QUIT $!" TERM QUIT INT
wait $! || wait $!
"""


def deployment(plan: Plan, pool: Pool, config: Object) -> Object:
    """`config` is the pool's ConfigMap."""
    name = plan.names.pool(pool.role)
    labels = plan.names.labels(pool.component) | plan.names.pool_selector(pool.role)
    told = {names.SIZES_ANNOTATION: "\n".join(_reasons(plan, pool)) + "\n"}
    made = deployment_head(plan, name, pool.component, told, pool.replicas, pool.scaling)
    if pool.role is not None:
        made["metadata"]["labels"][names.ROLE_LABEL] = pool.role.value
    if plan.disaggregated:
        labels[names.KV_LAYOUT_LABEL] = kv_layout(plan)
    annotations = {names.CONFIG_ANNOTATION: config_hash([config])}
    if plan.metrics.enabled:
        annotations |= scrape_annotations()
    return made | {
        "spec": {
            **made["spec"],
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": sizes.deadline(deploy_seconds(plan.spec)),
            # GPU nodes have no room for one more pod: one leaves before the next comes, and stays a while
            # before another leaves, as routers need as long to know of it as to forget one.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "minReadySeconds": sizes.DRAIN_DELAY,
            "selector": {"matchLabels": plan.names.pool_selector(pool.role)},
            "template": {
                "metadata": {"labels": labels, "annotations": annotations},
                "spec": _pod(plan, pool, name),
            },
        }
    }


def _pod(plan: Plan, pool: Pool, name: str) -> Object:
    kubernetes = plan.spec.kubernetes
    own_inits = list(kubernetes.init_containers or ()) if kubernetes else []
    told = {"terminationMessagePolicy": "FallbackToLogsOnError", "securityContext": locked(_user(plan))}
    fetchers = [c | told for c in weights.fetching(plan, pool)]
    containers = [_engine(plan, pool, name), _proxy(plan, pool)]
    if plan.metrics.enabled:
        mount = _mount("tandem-config", f"{_CONFIG}/collector.yaml", config_maps.COLLECTOR)
        containers.append(collector(plan, mount, f"{_CONFIG}/collector.yaml"))
    placed = affinity(plan, pool)
    pod: Object = {
        "serviceAccountName": (kubernetes and kubernetes.service_account_name) or plan.names.account,
        "automountServiceAccountToken": False,
        # Variables of a namespace's services may look like vLLM's own (VLLM_PORT).
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": plan.grace(pool).total,
        "initContainers": [*fetchers, *map(section, own_inits)],
        "containers": containers,
        "volumes": _volumes(plan, pool, name),
        "tolerations": tolerations(plan, pool),
        "nodeSelector": dict(pool.node_selector),
        "affinity": placed,
    }
    if kubernetes and kubernetes.scheduler_name:
        pod["schedulerName"] = kubernetes.scheduler_name
    return {key: value for key, value in pod.items() if value not in ([], {})}


def _engine(plan: Plan, pool: Pool, name: str) -> Object:
    worker = plan.spec.worker
    grace = plan.grace(pool)
    metrics = f"http://127.0.0.1:{plan.metrics.port}{plan.metrics.path}"
    drain = f"python3 {weights.SCRIPTS}/drain.py --metrics {metrics} --leave {grace.leave} "
    drain += f"--limit {grace.drain} --linger {grace.linger}"
    made: Object = {"name": name, "image": pool.image}
    if worker.command:
        made["command"] = list(worker.command)
    if arguments := engines.arguments(plan, pool):
        made["args"] = arguments
    if worker.working_dir:
        made["workingDir"] = worker.working_dir
    return made | {
        "env": engines.environment(plan, pool),
        "ports": _ports(plan, pool),
        **_probes(plan),
        # Without Python in the image the pod at least waits until it is forgotten.
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", f"{drain} || sleep {grace.leave}"]}}},
        "resources": _resources(plan, pool),
        # A crashed engine's last lines are in the pod's status, from which the operator tells them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": locked(_user(plan)),
        "volumeMounts": _engine_mounts(plan, pool),
    }


def _user(plan: Plan) -> int | None:
    return None if plan.settings.workers_as_root else MODEL_USER


def _ports(plan: Plan, pool: Pool) -> list[Object]:
    port = plan.spec.worker.model_invocation_port
    found: list[Object] = [{"name": port.name, "containerPort": port.container_port}]
    if pool.role is Role.PREFILL and not plan.lmcache_pd:
        found.append({"name": "nixl", "containerPort": names.SIDE_CHANNEL_PORT})
    return found


def _probes(plan: Plan) -> Object:
    """A failed liveness probe would end all streams of an engine that is only busy, so it takes as long as
    the longest prefill. The engine's process ends by itself when its core dies."""
    path, port = plan.balancer.health_path, plan.port
    every = 10
    patience = -(-plan.times.longest_prefill // 30) + 2
    made = {
        "startupProbe": http_probe(
            path,
            port,
            periodSeconds=every,
            timeoutSeconds=5,
            failureThreshold=max(3, deploy_seconds(plan.spec) // every),
        ),
        "readinessProbe": http_probe(path, port, periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "livenessProbe": http_probe(
            path, port, periodSeconds=30, timeoutSeconds=10, failureThreshold=patience
        ),
    }
    given = {name: section(probe) for name, probe in section(plan.spec.worker.probes).items() if probe}
    return made | given


def _resources(plan: Plan, pool: Pool) -> Object:
    """The role's own, with EFA interfaces for hand-offs, and requests where it has none: a pod without them
    is the first to go when a node runs short."""
    requests = dict(section(pool.resources.get("requests")))
    limits = dict(section(pool.resources.get("limits")))
    efa = plan.efa(pool)
    added: Object = {}
    if efa is not None and pool.efa is None:
        added[EFA] = str(efa.interfaces)
    if efa is not None and efa.hugepages:
        added[HUGE_PAGES] = sizes.quantity(efa.hugepages)
    requests, limits = requests | added, limits | added  # neither can be overcommitted
    for name, amount in (("cpu", str(2 + 2 * pool.gpus)), ("memory", _memory(plan, pool))):
        if name not in requests and name not in limits:
            requests[name] = amount
    made: Object = {"requests": requests, "limits": limits}
    claims = pool.resources.get("claims")
    return {k: v for k, v in (made | {"claims": claims}).items() if v}


def _memory(plan: Plan, pool: Pool) -> str:
    """What an engine needs at least: its processes, /dev/shm, the L1 cache."""
    ranks = max(1, pool.gpus)
    shm, _ = sizes.shared_memory(ranks)
    l1 = sizes.l1_cache(ranks)[0] * ranks if _has_l1(plan, pool) else 0
    return sizes.quantity(8 * sizes.GIB * ranks + shm + l1)


def _has_l1(plan: Plan, pool: Pool) -> bool:
    return plan.cache.of_role(pool.role) and config_maps.has_lmcache_file(plan)


def _engine_mounts(plan: Plan, pool: Pool) -> list[Object]:
    mounts: list[Object] = [
        weights.mount(plan),
        {"name": "shm", "mountPath": conventions.SHM_FOLDER},
        {"name": "tandem-tmp", "mountPath": conventions.TMP_FOLDER},
        {"name": "tandem-scripts", "mountPath": weights.SCRIPTS, "readOnly": True},
    ]
    if config_maps.has_lmcache_file(plan):
        mounts.append({"name": "lmcache-config", "mountPath": conventions.LMCACHE_FOLDER, "readOnly": True})
    return [*mounts, *pool.extensions.volume_mounts]


def _proxy(plan: Plan, pool: Pool) -> Object:
    given = plan.spec.metrics_sidecar_resources
    conf = f"{_CONFIG}/nginx.conf"
    mounts: list[Object] = [
        _mount("tandem-config", conf, config_maps.NGINX),
        {"name": "tandem-proxy-tmp", "mountPath": "/tmp"},
    ]
    if model_files.folder(plan, pool) is not None:
        mounts.append(weights.mount(plan))
    healthy = http_probe("/healthz", names.PROXY_METRICS_PORT, periodSeconds=10, timeoutSeconds=5)
    return {
        "name": names.PROXY_CONTAINER,
        "image": plan.settings.proxy_image,
        "command": ["sh", "-c", _PROXY_COMMAND, "sh", conf],
        "ports": [
            {"name": "proxy", "containerPort": names.PROXY_PORT},
            {"name": "proxy-metrics", "containerPort": names.PROXY_METRICS_PORT},
        ],
        "livenessProbe": healthy | {"periodSeconds": 30},
        "readinessProbe": healthy,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(plan.grace(pool).leave)]}}},
        "resources": dict(given) if given else resources("100m", "64Mi", "2", "512Mi"),
        "securityContext": locked(PROXY_USER),
        "volumeMounts": mounts,
    }


def _mount(volume: str, path: str, key: str) -> Object:
    return {"name": volume, "mountPath": path, "subPath": key, "readOnly": True}


def _volumes(plan: Plan, pool: Pool, name: str) -> list[Object]:
    kubernetes = plan.spec.kubernetes
    own = [
        v.model_dump(by_alias=True, exclude_unset=True) for v in (kubernetes.volumes if kubernetes else ())
    ]
    shm, _ = sizes.shared_memory(max(1, pool.gpus))
    served = [config_maps.NGINX] + ([config_maps.COLLECTOR] if plan.metrics.enabled else [])
    copies = weights.prefetched(plan) and weights.has_claim(plan)
    scripts = [config_maps.DRAIN]
    if weights.prefetched(plan) and not copies:
        scripts.append(config_maps.DOWNLOAD)
    made: list[Object] = [
        *weights.volumes(plan),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": sizes.quantity(shm)}},
        {"name": "tandem-tmp", "emptyDir": {}},
        {"name": "tandem-proxy-tmp", "emptyDir": {}},
        _config_volume("tandem-config", name, served),
        _config_volume("tandem-scripts", name, scripts),
    ]
    if copies:
        made.append(_config_volume(weights.COPY_SCRIPT_VOLUME, name, [config_maps.COPY]))
    if config_maps.has_lmcache_file(plan):
        made.append(_config_volume("lmcache-config", name, [config_maps.LMCACHE]))
    return [*made, *own, *pool.extensions.volumes]


def _config_volume(name: str, config_map: str, keys: list[str]) -> Object:
    items = [{"key": key, "path": key} for key in keys]
    return {"name": name, "configMap": {"name": config_map, "items": items}}


def _reasons(plan: Plan, pool: Pool) -> list[str]:
    """How the pool's sizes came about, a line each."""
    efa = plan.efa(pool)
    found = [
        plan.buffer.reason if plan.buffer and pool.role is Role.DECODE else None,
        efa.reason if efa else None,
        sizes.shared_memory(max(1, pool.gpus))[1],
        sizes.l1_cache(pool.gpus)[1] if _has_l1(plan, pool) else None,
        plan.times.reason,
        plan.grace(pool).reason,
    ]
    return [reason for reason in found if reason]
