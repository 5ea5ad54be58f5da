"""vLLM's NixlConnector, pull: the prefill leg computes and leases its KV blocks, the decode leg reads them.

1. The prefill leg is the client's request cut to one token, with `do_remote_decode`. Its answer carries
   `kv_transfer_params`: where the blocks lie and under which id. They are opaque here.
2. The decode leg is the client's request unchanged plus those parameters; the decoder reads the blocks
   over NIXL and computes only the last prompt token.

The prefiller frees the blocks when they were read, or when their lease ends (`kv_lease_duration`).
Nothing is reserved: blocks are shared between prompts with a common prefix, so prompts counted in full would
be held back without need, and a decoder without room makes the hand-off wait in its own queue, renewing the
lease, while what runs there goes on and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.connectors.base import Claim, PrefillFailed
from tandem.router.connectors.bodies import cut_to_one_token
from tandem.router.engines import Engine

_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_NULL = msgspec.Raw(b"null")


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL  # opaque, so not decoded


_reply = msgspec.json.Decoder(_Reply)
_params = msgspec.json.Decoder(dict[str, Any] | None)  # looked at, not read


class Nixl:
    counts = False
    pushes = False
    # Every process has an engine id of its own, and parameters of another one are refused.
    survives_decoder_restart = True
    longest: int | None = None

    def reservation(self, tokens: int, decoder: Engine) -> Sequence[Claim]:
        return ()

    def attempt(self, decoder: Engine) -> NixlAttempt:
        return NixlAttempt()


class NixlAttempt:
    """Holds what the prefill leg's answer says until the decode leg takes it."""

    key: str | None = None

    def __init__(self) -> None:
        self._params: msgspec.Raw | None = None
        self._used = False

    def prepare_prefill(self, api: Api, body: Body) -> bytes:
        return cut_to_one_token(api, body, _REMOTE_DECODE)

    def on_prefill_reply(self, reply: bytes) -> None:
        try:
            answer = _reply.decode(reply)
            params = _params.decode(answer.kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PrefillFailed("bad_reply", f"the prefill answer is not what vLLM sends: {error}") from None
        if not params:
            raise PrefillFailed("no_kv_params", "the prefill answer has no kv_transfer_params")
        self._params = answer.kv_transfer_params

    def on_prefill_failure(self) -> None:
        pass  # what is left on the prefiller ends with its lease

    def on_notification(self) -> None:
        raise RuntimeError("NIXL sends no notifications")

    @property
    def missing(self) -> str | None:
        return "the prefill leg's answer" if self._params is None else None

    def prepare_decode(self, api: Api, body: Body) -> bytes:
        if self._params is None or self._used:
            raise RuntimeError("hand-off parameters are there once, after the prefill leg's answer")
        self._used = True
        return body.edited({"kv_transfer_params": self._params})

    def prepare_release(self, api: Api, body: Body) -> bytes | None:
        return None
