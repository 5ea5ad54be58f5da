"""Where a router learns of its engines."""

from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.configured import discovery
from tandem.router.discovery.dns import DnsDiscovery
from tandem.router.discovery.file import FileDiscovery
from tandem.router.discovery.merged import MergedDiscovery, Source
from tandem.router.discovery.static import StaticDiscovery

__all__ = [
    "Discovery",
    "DnsDiscovery",
    "FileDiscovery",
    "Member",
    "MergedDiscovery",
    "Source",
    "StaticDiscovery",
    "discovery",
]
