"""The load balancer: an Ingress for the AWS Load Balancer Controller."""

from __future__ import annotations

from tandem.operator import sizes
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.wishes import invocation_path, section

_PREFIX = "alb.ingress.kubernetes.io/"


def ingress(plan: Plan) -> Object:
    """Before the router in the system namespace, or before the pods of a colocated endpoint without one."""
    certificate = section(section(plan.spec.tls_config).get("customCertificateConfig"))
    idle = plan.balancer.idle_seconds or min(sizes.ALB_LONGEST_IDLE, plan.times.longest_silence + 30)
    annotations = {
        "scheme": "internal",
        "target-type": "ip",
        "backend-protocol": "HTTP",
        "listen-ports": '[{"HTTPS":443}]' if certificate else '[{"HTTP":80}]',
        # The router's readiness says whether it can serve; its /health, only that it lives.
        "healthcheck-path": "/ready" if plan.routed else plan.balancer.health_path,
        "load-balancer-attributes": f"idle_timeout.timeout_seconds={idle}",
        "target-group-attributes": (
            f"load_balancing.algorithm.type={plan.balancer.algorithm},"
            f"deregistration_delay.timeout_seconds={min(3600, plan.times.longest_stream)}"
        ),
    }
    if certificate:
        annotations["certificate-arn"] = certificate["acmArn"]
    name = plan.names.ingress(routed=plan.routed)
    component = "router" if plan.routed else plan.pools[0].component
    made = head(
        plan,
        "networking.k8s.io/v1",
        "Ingress",
        name,
        component,
        system=plan.routed,
        annotations={_PREFIX + key: value for key, value in annotations.items()},
    )
    service = plan.names.routing_service if plan.routed else plan.names.pool(None)
    backend = {"service": {"name": service, "port": {"name": "http"}}}
    path = {"path": invocation_path(plan.spec), "pathType": "Prefix", "backend": backend}
    rule: Object = {"http": {"paths": [path]}}
    if certificate:
        rule = {"host": certificate["domainName"], **rule}
    return made | {"spec": {"ingressClassName": "alb", "rules": [rule]}}
