"""LMCache's PD hand-off (LMCacheConnectorV1 0.5.6, `pd_backend_mode: sync`), push: the prefiller writes its
KV into the decoder's buffer.

Prefiller (`Sender`): a request with a `disagg_spec` is sent there after every step that computes of it, and
the router is told when all of it was written. Decoder (`Receiver`): a request whose chunks are in the buffer,
under its tokens and its tags, takes them out. Nothing is checked: chunks count as there from their allocation
on, and stay until somebody takes them.
"""

from __future__ import annotations

from tandem.sim.args import UsageError
from tandem.sim.handoff import HandOff, Host
from tandem.sim.lmcache.keys import Keys
from tandem.sim.lmcache.notify import ProxyNotif
from tandem.sim.lmcache.receiver import Receiver
from tandem.sim.lmcache.sender import Sender
from tandem.sim.lmcache.settings import Settings, read

__all__ = ["ProxyNotif", "Receiver", "Sender", "Settings", "make", "read"]


def make(host: Host, settings: Settings, *, model: str, ranks: int, listen: bool) -> HandOff:
    """One engine's side. `listen`: let engines of other processes in. Raises UsageError."""
    page_bytes = settings.chunk_size * host.profile.kv_bytes_per_token // ranks
    if settings.buffer_bytes < page_bytes:
        raise UsageError(
            f"LMCache: pd_buffer_size {settings.buffer_bytes} is smaller than one chunk of {page_bytes} bytes"
        )
    keys = Keys(model, ranks=ranks, chunk_size=settings.chunk_size, seed=settings.hash_seed)
    if settings.role == "sender":
        return Sender(host, settings, keys, ranks=ranks, page_bytes=page_bytes)
    return Receiver(host, settings, keys, page_bytes=page_bytes, listen=listen)
