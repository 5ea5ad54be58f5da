"""LMCache PD (LMCacheConnectorV1 over NIXL), push: the prefiller writes its KV into the decoder's buffer.

1. The decoder is chosen first: the prefill leg is the client's request cut to one token, with a `disagg_spec`
   that names the decoder's ports and an id.
2. The prefiller asks the decoder for chunks of its receive buffer, writes the KV over NIXL, and every rank
   sends the router a notification with that id. Notification and HTTP answer come in either order.
3. The decode leg is the client's request unchanged plus the tag, and is sent when all of both have come: keys
   are known to the decoder from the allocation on, so one that comes earlier is answered from whatever the
   buffer holds.

The tag (`lmcache.tag.req`, unique for each hand-off) enters the keys. A decode leg without it finds nothing
and computes the prompt: that is the fallback when a notification is lost. It also keeps requests with the
same text from taking each other's chunks.

Another tag (`lmcache.tag.space`) stands for what else KV depends on, of which LMCache knows nothing: the
model, which may be an adapter, and the `cache_salt`. The keys of what prefillers keep (their L1 and L2; see
tandem_vllm.kv_tiers) have this tag and not the first, so that it is found for the same model and salt only.

A decoder frees chunks when they are read, and never else. So a prefill leg that has begun is not cancelled,
and a hand-off that nobody uses is read by a release leg of one token. The buffer is the router's to keep:
LMCache does not bound it, and a full one stalls every prefiller that writes to it. Each rank has its own
chunks in its own buffer, so one rank's share stands for all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.connectors.base import Claim
from tandem.router.connectors.bodies import cut_to_one_token
from tandem.router.engines import Engine
from tandem.router.random_ids import random_hex

TAG = "lmcache.tag.req"
SPACE_TAG = "lmcache.tag.space"


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where a decoder takes KV. One port of each kind for each of its tensor-parallel ranks."""

    host: str
    init_ports: tuple[int, ...]
    alloc_ports: tuple[int, ...]


class LMCache:
    counts = True
    pushes = True
    # A prefiller never shakes hands with it again, and its writes fail for ever.
    survives_decoder_restart = False

    def __init__(
        self,
        receiver: Callable[[str], Receiver],
        *,
        chunk_size: int,
        buffer_chunks: int,
        ranks: int,
        longest: int | None = None,
    ) -> None:
        """`receiver`: that of the decoder with a URL. `chunk_size`: tokens, as both roles' LMCache has it.
        `buffer_chunks`: chunks that one rank's receive buffer holds (pd_buffer_size over the bytes of a
        chunk). `ranks`: how many ranks of a prefiller notify. `longest`: tokens that a prefiller computes in
        one step; what takes several is notified before it is whole."""
        self.longest = longest
        self._receiver = receiver
        self._chunk_size = chunk_size
        self._buffer_chunks = buffer_chunks
        self._ranks = ranks

    def reservation(self, tokens: int, decoder: Engine) -> Sequence[Claim]:
        chunks = -(-tokens // self._chunk_size)
        return (Claim(decoder, "receive_chunks", chunks, self._buffer_chunks),)

    def attempt(self, decoder: Engine) -> LMCacheAttempt:
        return LMCacheAttempt(self._receiver(decoder.url), self._ranks)


class LMCacheAttempt:
    """Counts what has come; knows the tag."""

    def __init__(self, receiver: Receiver, ranks: int) -> None:
        # Unguessable, as KV is found by it, and new for each attempt: under the tag of a failed write the
        # same prompt is notified as sent. Letters and digits: LMCache splits keys at "@".
        self.key: str | None = random_hex(16)
        self._receiver = receiver
        self._answered = False
        self._ranks = self._silent_ranks = ranks
        self._used = False

    def _tags(self, body: Body) -> dict[str, Any]:
        space = json.dumps([body.get("model"), body.get("cache_salt") or None])
        if space == "[null, null]":
            return {TAG: self.key}
        # In letters and digits, as LMCache splits keys at "@" and "%"; and salts are no one else's to read.
        return {TAG: self.key, SPACE_TAG: hashlib.sha256(space.encode()).hexdigest()}

    def prepare_prefill(self, api: Api, body: Body) -> bytes:
        # Ports as lists: LMCache dies of a number. Without `ret_first_tok`: a prefill that is cancelled with
        # it kills the engine.
        spec = {
            "req_id": self.key,
            "receiver_host": self._receiver.host,
            "receiver_init_port": list(self._receiver.init_ports),
            "receiver_alloc_port": list(self._receiver.alloc_ports),
        }
        return cut_to_one_token(api, body, {"disagg_spec": spec, **self._tags(body)})

    def on_prefill_reply(self, reply: bytes) -> None:
        self._answered = True  # it says nothing of the hand-off; the notifications do

    def on_prefill_failure(self) -> None:
        self._answered = self._used = True

    def on_notification(self) -> None:
        self._silent_ranks -= 1

    @property
    def missing(self) -> str | None:
        if not self._answered:
            return "the prefill leg's answer"
        silent = self._silent_ranks
        return f"{silent} of {self._ranks} notifications" if silent > 0 else None

    def prepare_decode(self, api: Api, body: Body) -> bytes:
        if self.missing is not None or self._used:
            raise RuntimeError("the KV is there once, after the answer and every notification")
        self._used = True
        return body.edited({"kv_transfer_params": self._tags(body)})

    def prepare_release(self, api: Api, body: Body) -> bytes | None:
        # The prefill leg's own body but for the parameters: the same prompt, and what one engine has accepted
        # the other does.
        return cut_to_one_token(api, body, self._tags(body))
