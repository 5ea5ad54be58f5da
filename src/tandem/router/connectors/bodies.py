"""The prefill leg's body, for every connector: the client's request cut to one token."""

from __future__ import annotations

from typing import Any

from tandem.router.body import Body
from tandem.router.classify import Api

# Dropped from the prefill leg: they shape the answer, not the prompt, and would end the one token
# early, forbid it, or make the engine work for output that nobody reads.
ANSWER_FIELDS = (
    "stream_options",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "return_token_ids",
)


def cut_to_one_token(api: Api, body: Body, kv_transfer_params: dict[str, Any]) -> bytes:
    """The request with the same prompt and one token of answer, not streamed."""
    changes: dict[str, Any] = {
        "max_tokens": 1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        "kv_transfer_params": kv_transfer_params,
    }
    if api is Api.CHAT:
        # Both, as a request that sets only the newer name would otherwise run to its full length.
        changes["max_completion_tokens"] = 1
        # A forced tool call cannot be made in one token; the tools stay, as they shape the prompt. "auto" is
        # refused without a tool parser, as the forced kinds are: so both legs take the same requests.
        if "tool_choice" in body and body.get("tool_choice") not in (None, "none", "auto"):
            changes["tool_choice"] = "auto"
    return body.edited(changes, drop=ANSWER_FIELDS)
