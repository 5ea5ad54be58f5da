"""vLLM's NixlConnector, pull: the prefill leg computes and leases its KV blocks, the decode leg reads them.

1. The prefill leg is the client's request cut to one token, with `do_remote_decode`. Its answer carries
   `kv_transfer_params`: where the blocks lie and under which id. They are opaque here.
2. The decode leg is the client's request unchanged plus those parameters; the decoder reads the blocks
   over NIXL and computes only the last prompt token.

The prefiller frees the blocks when they were read, or when their lease ends (`kv_lease_duration`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.connectors.base import Handoff, PrefillFailed

_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Dropped from the prefill leg: they shape the answer, not the prompt, and would end the one token
# early, forbid it, or make the engine work for output that nobody reads.
_ANSWER_FIELDS = (
    "stream_options",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "return_token_ids",
)


_NULL = msgspec.Raw(b"null")


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NULL  # opaque, so not decoded


_reply = msgspec.json.Decoder(_Reply)
_params = msgspec.json.Decoder(dict[str, Any] | None)  # looked at, not read


class Nixl:
    """Builds both legs of one request and reads the first one's answer."""

    def prepare_prefill(self, api: Api, body: Body) -> bytes:
        changes: dict[str, Any] = {
            "max_tokens": 1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stream": False,
            "kv_transfer_params": _REMOTE_DECODE,
        }
        if api is Api.CHAT:
            # Both, as a request that sets only the newer name would otherwise run to its full length.
            changes["max_completion_tokens"] = 1
            # A forced tool call cannot be made in one token; the tools stay, as they shape the prompt.
            if "tool_choice" in body and body.get("tool_choice") not in (None, "none", "auto"):
                changes["tool_choice"] = "auto"
        return body.edited(changes, drop=_ANSWER_FIELDS)

    def on_prefill_reply(self, reply: bytes) -> Handoff:
        try:
            answer = _reply.decode(reply)
            params = _params.decode(answer.kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PrefillFailed("bad_reply", f"the prefill answer is not what vLLM sends: {error}") from None
        if not params:
            raise PrefillFailed("no_kv_params", "the prefill answer has no kv_transfer_params")
        return Handoff(answer.kv_transfer_params)

    def prepare_decode(self, api: Api, body: Body, handoff: Handoff) -> bytes:
        return body.edited({"kv_transfer_params": handoff.spend()})
