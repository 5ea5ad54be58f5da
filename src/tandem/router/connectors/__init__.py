"""KV connectors as sans-IO state machines: which legs a request has, and what each leg's body says."""

from tandem.router.connectors.base import Connector, Handoff, PrefillFailed
from tandem.router.connectors.nixl import Nixl

CONNECTORS: dict[str, type[Connector]] = {"nixl": Nixl}

__all__ = ["CONNECTORS", "Connector", "Handoff", "Nixl", "PrefillFailed"]
