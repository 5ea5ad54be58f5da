"""Where a router learns of its engines."""

from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.static import StaticDiscovery

__all__ = ["Discovery", "Member", "StaticDiscovery"]
