"""Service accounts. None has a token in its pod or a right in the API: engines are found by DNS."""

from __future__ import annotations

from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan


def model_account(plan: Plan) -> Object | None:
    """The model pods'; None where the resource names one of its own."""
    kubernetes = plan.spec.kubernetes
    if kubernetes is not None and kubernetes.service_account_name:
        return None
    component = plan.pools[0].component if len(plan.pools) == 1 else "model"
    made = head(plan, "v1", "ServiceAccount", plan.names.account, component)
    return made | {"automountServiceAccountToken": False}


def router_account(plan: Plan) -> Object:
    made = head(plan, "v1", "ServiceAccount", plan.names.router, "router", system=True)
    return made | {"automountServiceAccountToken": False}
