"""The fields of requests and their types, as vLLM 0.32 declares them. pydantic tells what is wrong with one
in the words that vLLM's clients see.

Fields of what is not simulated (structured outputs, images, …) are not among them: like unknown ones they are
taken as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from tandem.sim.refusal import invalid

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = list[Annotated[int, Field(ge=0)]]
MAX_STOP_STRINGS = 4


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(BaseModel):
    name: str
    description: str | None = None
    content: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuralTag(BaseModel):
    type: Literal["structural_tag"]
    format: Any


class LegacyStructure(BaseModel):
    begin: str
    content: dict[str, Any] | None = Field(default=None, alias="schema")
    end: str


class LegacyStructuralTag(BaseModel):
    type: Literal["structural_tag"]
    structures: list[LegacyStructure]
    triggers: list[str]


class Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    function: FunctionName
    type: Literal["function"] = "function"


class Generate(BaseModel):
    """What both kinds of generation have."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    response_format: ResponseFormat | StructuralTag | LegacyStructuralTag | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] = []
    priority: Int64 = 0
    request_id: str = ""
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


class Chat(Generate):
    """The body of /v1/chat/completions."""

    messages: list[Any]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    tools: list[Tool] | None = None
    tool_choice: Literal["none"] | Literal["auto"] | Literal["required"] | NamedTool | None = "none"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Completion(Generate):
    """The body of /v1/completions."""

    prompt: TokenIds | list[TokenIds] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    suffix: str | None = None
    add_special_tokens: bool = True


class TokenizeText(BaseModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(BaseModel):
    model: str | None = None
    messages: list[Any]
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class Detokenize(BaseModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**63 - 1)]]


T = TypeVar("T")

CHAT = TypeAdapter(Chat)
COMPLETION = TypeAdapter(Completion)
TOKENIZE: TypeAdapter[TokenizeText | TokenizeChat] = TypeAdapter(TokenizeText | TokenizeChat)
DETOKENIZE = TypeAdapter(Detokenize)


def check(kind: TypeAdapter[T], body: object) -> T:
    """The request in a decoded body. Raises Refused."""
    try:
        return kind.validate_python(body, from_attributes=True)
    except ValidationError as error:
        entries = [
            {
                "type": e["type"],
                "loc": _place(e["loc"]),
                **{k: e[k] for k in ("msg", "input", "ctx") if k in e},
            }
            for e in error.errors(include_url=False)
        ]
        raise invalid(entries) from None


def coerced(request: BaseModel, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the values that its simple fields were taken for: "5" as 5, 1 as True."""
    plain = {
        name: value
        for name in request.model_fields_set
        if isinstance(value := getattr(request, name), bool | int | float | str)
    }
    return {**body, **plain}


_MODELS = {
    m.__name__
    for m in (ResponseFormat, StructuralTag, LegacyStructuralTag, NamedTool, TokenizeText, TokenizeChat)
}
_TYPES = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})


def _place(loc: tuple[int | str, ...]) -> str:
    """Less what names pydantic's way through a union."""
    parts = [str(part) for part in loc]
    names = [p for p in parts if p not in _MODELS and p not in _TYPES and not set(p) & set("[](){}")]
    return ".".join(["body", *names])
