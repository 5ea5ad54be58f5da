"""Services: of each pool, by which its pods are found; of the router, for clients and prefillers."""

from __future__ import annotations

from tandem.operator import names
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool


def pool_service(plan: Plan, pool: Pool) -> Object:
    """With a router headless: its name has the address of every pod that is ready, and none of a pod that
    leaves. Without one it spreads requests."""
    made = head(plan, "v1", "Service", plan.names.pool(pool.role), pool.component)
    port = {"name": "http", "port": names.PROXY_PORT if plan.routed else 80, "targetPort": "proxy"}
    headless = {"clusterIP": "None"} if plan.routed else {"type": "ClusterIP"}
    # One kind of address: an engine with two would count as two.
    return made | {
        "spec": {
            **headless,
            "ipFamilyPolicy": "SingleStack",
            "selector": plan.names.pool_selector(pool.role),
            "ports": [port],
        }
    }


def routing_service(plan: Plan) -> Object:
    """Where clients and the load balancer reach the router: port 443, plain HTTP, as on HyperPod."""
    made = head(plan, "v1", "Service", plan.names.routing_service, "router", system=True)
    port = {
        "name": "http",
        "appProtocol": "http",
        "port": names.ROUTING_SERVICE_PORT,
        "targetPort": "http",
    }
    spec = {"type": "ClusterIP", "selector": plan.names.router_selector(), "ports": [port]}
    return made | {"spec": spec}


def notify_service(plan: Plan) -> Object:
    """Where prefillers send LMCache's notifications: the router from when a decoder answers until it leaves.

    An address that is still published when its pod is gone would hold prefillers up: they connect to it
    within the second in which the old router ends, nobody answers, and TCP goes on trying there for two
    minutes, whatever the service leads to by then. Where it leads nowhere they are refused at once, and try
    again until the next router is there."""
    made = head(plan, "v1", "Service", plan.names.notify_service, "router", system=True)
    return made | {
        "spec": {
            "type": "ClusterIP",
            "selector": plan.names.router_selector(),
            "ports": [{"name": "notify", "port": names.NOTIFY_PORT, "targetPort": "notify"}],
        }
    }
