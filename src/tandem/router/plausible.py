"""Whether an engine would accept what only the decode leg asks of it, as far as a quick look can tell.

The rest of a request is in the prefill leg too, and an engine looks at all of it before it computes. But what
shapes the answer is left out there (`connectors.bodies`), so a fault in it shows when the prompt has been
computed: the work is lost, and the KV lies on the prefiller until its lease ends (vLLM issue 41269). In doubt
the decoder serves the request alone, so its own words reach the client, and a needless doubt costs no more
than that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.router.body import Body
from tandem.router.classify import Api

_Logprobs = Annotated[int, Meta(ge=0, le=20)]  # vLLM's --max-logprobs unless it is set
_StopString = Annotated[str, Meta(min_length=1)]
_StopStrings = Annotated[list[_StopString], Meta(max_length=4)]  # VLLM_MAX_STOP_STRINGS unless it is set
_TokenId = Annotated[int, Meta(ge=0)]
_DEFAULT_MAX_TOKENS = 16  # of a completion; a chat may fill the context
# Of these structured outputs take one.
_CONSTRAINTS = frozenset({"json", "regex", "choice", "grammar", "json_object", "structural_tag"})


class _JsonSchema(msgspec.Struct):
    name: str
    schema: dict[str, Any]


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: _JsonSchema | None = None


class _Named(msgspec.Struct):
    name: str


class _Function(msgspec.Struct):
    function: _Named


class _Answer(msgspec.Struct):
    """As vLLM 0.32 has them: null is given to those that take it, and numbers in their ranges."""

    max_tokens: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    stop: _StopString | _StopStrings | None = None
    stop_token_ids: list[_TokenId] | None = None
    response_format: _ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    logprob_token_ids: list[_TokenId] | None = None

    def longest(self) -> int | None:
        """The most tokens that are asked for; None: as many as there is room for."""
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def contradicts_itself(self) -> bool:
        asked, structured = self.response_format, self.structured_outputs
        return (
            bool(self.stream_options and not self.stream)
            or (asked is not None and asked.type == "json_schema" and asked.json_schema is None)
            or (structured is not None and sum(structured.get(c) is not None for c in _CONSTRAINTS) != 1)
        )


class _CompletionAnswer(_Answer):
    logprobs: bool | _Logprobs | None = None

    def contradicts_itself(self) -> bool:
        return super().contradicts_itself() or (bool(self.logprob_token_ids) and self.logprobs is None)


class _ChatAnswer(_Answer):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: _Logprobs | None = None
    tools: list[_Function] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Function | None = None

    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def contradicts_itself(self) -> bool:
        wants_logprobs = bool(self.top_logprobs) or bool(self.logprob_token_ids)
        chosen = self.tool_choice.function if isinstance(self.tool_choice, _Function) else None
        return (
            super().contradicts_itself()
            or (wants_logprobs and not self.logprobs)
            or (chosen is not None and chosen not in [tool.function for tool in self.tools or ()])
        )


# vLLM takes 1.0 and "1" for 1.
_DECODERS: dict[Api, msgspec.json.Decoder[_Answer]] = {
    Api.CHAT: msgspec.json.Decoder(_ChatAnswer, strict=False),
    Api.COMPLETIONS: msgspec.json.Decoder(_CompletionAnswer, strict=False),
}
_FIELDS = {Api.CHAT: _ChatAnswer.__struct_fields__, Api.COMPLETIONS: _CompletionAnswer.__struct_fields__}


class Outline(msgspec.Struct, frozen=True):
    """What of a request decides whether it is plausible for a decoder."""

    longest: int | None
    """The most tokens that are asked for; None: as many as there is room for."""
    min_tokens: int


def outline(api: Api, body: Body) -> Outline | None:
    """None: no decoder would take it."""
    try:
        answer = _DECODERS[api].decode(body.picked(_FIELDS[api]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if answer.contradicts_itself() else Outline(answer.longest(), answer.min_tokens)


def is_plausible(api: Api, body: Body, tokens: int | None, max_model_len: int | None) -> bool:
    """False where the decode leg would probably be rejected. `tokens` of prompt, where they were counted;
    `max_model_len`: the decoder's context, in tokens."""
    known = outline(api, body) if body.facts is None else body.facts.apis[api.value].outline
    if known is None:
        return False
    longest = known.longest
    if longest is not None and longest < 1:
        return False
    if max_model_len is not None:
        if longest is not None and longest > max_model_len:
            return False
        room = max_model_len - (tokens or 0)  # a larger answer is cut to what there is room for
        longest = room if longest is None else min(longest, room)
    return longest is None or known.min_tokens <= longest
