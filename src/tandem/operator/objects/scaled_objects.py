"""KEDA's ScaledObjects, of pools and of the router."""

from __future__ import annotations

from tandem.operator import scaling
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.wishes import AutoScaling


def scaled_objects(plan: Plan) -> list[Object]:
    """All of an endpoint, and what they sign their queries with: one for both roles."""
    made: list[Object] = []
    for pool in plan.pools:
        of_pool = _scaled(plan, pool.scaling, plan.names.pool(pool.role), pool.component)
        made += [found for found in of_pool if found not in made]
    return made + _scaled(plan, scaling.router_scaling(plan), plan.names.router, "router", system=True)


def _scaled(
    plan: Plan, wish: AutoScaling | None, target: str, component: str, *, system: bool = False
) -> list[Object]:
    triggers = scaling.triggers(plan, wish) if wish is not None else []
    if wish is None or not triggers:
        return []
    # By the use of a CPU alone nothing can be scaled from or to none.
    least = 1 if all(t["type"] == "cpu" for t in triggers) else 0
    made = head(plan, "keda.sh/v1alpha1", "ScaledObject", target, component, system=system)
    scaled = made | {
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
            "minReplicaCount": max(least, wish.minimum),
            "maxReplicaCount": wish.maximum,
            "pollingInterval": max(1, wish.polling),  # KEDA's least
            "cooldownPeriod": wish.cooldown,
            "initialCooldownPeriod": wish.initial_cooldown,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleDown": {"stabilizationWindowSeconds": wish.down_stabilization},
                        "scaleUp": {"stabilizationWindowSeconds": wish.up_stabilization},
                    }
                }
            },
            "triggers": triggers,
        }
    }
    if not scaling.needs_authentication(triggers):
        return [scaled]
    name, of = scaling.authentication_name(plan, system=system), "router" if system else "model"
    signing = head(plan, "keda.sh/v1alpha1", "TriggerAuthentication", name, of, system=system)
    return [signing | {"spec": {"podIdentity": {"provider": "aws"}}}, scaled]
