"""PodDisruptionBudgets: a node that is drained takes one pod of a kind at a time."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool


def pool_budget(plan: Plan, pool: Pool) -> Object:
    name, selector = plan.names.pool(pool.role), plan.names.pool_selector(pool.role)
    return _budget(plan, name, pool.component, selector, system=False)


def router_budget(plan: Plan) -> Object:
    return _budget(plan, plan.names.router, "router", plan.names.router_selector(), system=True)


def _budget(plan: Plan, name: str, component: str, selector: Mapping[str, str], *, system: bool) -> Object:
    """A number that may be missing, not one that must be there: one pod alone would block its node for
    ever. A pod that is not ready is in nobody's way."""
    made = head(plan, "policy/v1", "PodDisruptionBudget", name, component, system=system)
    return made | {
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(selector)},
        }
    }
