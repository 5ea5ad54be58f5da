"""KV connectors as sans-IO state machines: which legs a request has, and what each leg's body says."""

from tandem.router.connectors.base import Attempt, Claim, Connector, PrefillFailed
from tandem.router.connectors.lmcache import LMCache, Receiver
from tandem.router.connectors.nixl import Nixl

__all__ = ["Attempt", "Claim", "Connector", "LMCache", "Nixl", "PrefillFailed", "Receiver"]
