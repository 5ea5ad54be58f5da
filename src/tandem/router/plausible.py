"""Whether an engine would accept a request's answer fields, as far as a quick look can tell.

Only the decode leg has them all. A request that it would reject is not worth a prefill: the work would be
lost, and the KV lie on the prefiller until its lease ends (vLLM issue 41269). In doubt the decoder serves the
request alone, so its own words reach the client, and a needless doubt costs no more than that.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.router.body import Body

_Count = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Logprobs = Annotated[int, Meta(ge=0, le=20)]  # vLLM's --max-logprobs unless it is set


class _Answer(msgspec.Struct):
    """The ranges of vLLM's SamplingParams and of its request models."""

    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    length_penalty: float | None = None
    seed: int | None = None
    logprobs: bool | _Logprobs | None = None
    top_logprobs: _Logprobs | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None


_answer = msgspec.json.Decoder(_Answer)
_FIELDS = _Answer.__struct_fields__


def is_plausible(body: Body, max_model_len: int | None) -> bool:
    """False where the decode leg would probably be rejected. `max_model_len`: the decoder's context, in
    tokens."""
    try:
        answer = _answer.decode(body.picked(_FIELDS))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if answer.stream_options is not None and not answer.stream:
        return False
    asked = [n for n in (answer.max_completion_tokens, answer.max_tokens) if n is not None]
    longest = asked[0] if asked else None
    if longest is None:
        return True
    if max_model_len is not None and longest > max_model_len:
        return False
    return answer.min_tokens is None or answer.min_tokens <= longest
