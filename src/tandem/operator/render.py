"""From the resource to every object that it needs in a cluster: a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.api import Endpoint
from tandem.operator.notes import notes
from tandem.operator.objects import (
    accounts,
    config_maps,
    disruption,
    ingress,
    policies,
    router,
    scaled_objects,
    services,
    storage,
    workers,
)
from tandem.operator.objects.common import Object
from tandem.operator.plan import Plan, plan
from tandem.operator.settings import Settings


@dataclass(frozen=True)
class Rendering:
    objects: tuple[Object, ...]
    """In an order in which they can be applied: what pods need comes before them."""
    notes: tuple[str, ...]
    """What of the resource was replaced or has no effect, and what was decided; one line each."""


def render(endpoint: Endpoint, settings: Settings | None = None) -> Rendering:
    """The objects of an endpoint, in its namespace and in the system namespace.

    The namespaces themselves must be there. Raises RenderError, with the field's path, where the resource
    leaves no way to run it.
    """
    return rendered(plan(endpoint, settings or Settings()))


def rendered(made: Plan) -> Rendering:
    """The objects of what was decided."""
    objects = [account for account in (accounts.model_account(made),) if account]
    objects += storage.storage(made)
    for pool in made.pools:
        config = config_maps.pool_config(made, pool)
        objects += [
            config,
            policies.pool_policy(made, pool),
            services.pool_service(made, pool),
            disruption.pool_budget(made, pool),
            workers.deployment(made, pool, config),
        ]
    if made.routed:
        objects += _router(made)
    objects.append(ingress.ingress(made))
    objects += scaled_objects.scaled_objects(made)
    return Rendering(tuple(objects), notes(made))


def _router(made: Plan) -> list[Object]:
    config = config_maps.router_config_map(made)
    return [
        accounts.router_account(made),
        *accounts.router_rights(made),
        *([config] if config else []),
        policies.router_policy(made),
        services.routing_service(made),
        *([services.notify_service(made)] if made.lmcache_pd else []),
        disruption.router_budget(made),
        router.deployment(made, config),
    ]
