"""How many tokens a prompt has: counted here where that is exact, else by an engine's /tokenize."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.prompt import BadPrompt, NotExact, PromptCounter
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.engines import Engine, EngineRole, Fleet
from tandem.router.errors import ApiError
from tandem.router.legs import LegFailed, Legs

logger = logging.getLogger("tandem.router")

# What vLLM's /tokenize reads of each request.
_TOKENIZE_FIELDS = {
    Api.CHAT: (
        "model",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "tools",
    ),
    Api.COMPLETIONS: ("model", "prompt", "add_special_tokens"),
}

_COUNT = msgspec.json.Decoder(type=dict[str, Any])

# Odd on purpose: several scripts, runs of spaces, digits, a special token's text and code.
_SAMPLE = "Tandem counts  tokens:\n\n\tnaïve Übung, 数える, 🚲 3.14159 == `x[i]` </s> <|im_end|> 1,000,000"


@dataclass(frozen=True, slots=True)
class Count:
    tokens: int
    by: str
    """`local` or `engine`."""


class Counter:
    """Counts prompts exactly. Starts local where a tokenizer was loaded; `check` may demote it for good."""

    def __init__(self, local: PromptCounter | None, legs: Legs, fleet: Fleet) -> None:
        self._local = local
        self._legs = legs
        self._fleet = fleet

    async def count(self, api: Api, body: Body) -> Count:
        """Tokens of a request's prompt. Raises ApiError 400 for a prompt that cannot be rendered."""
        if self._local is not None:
            try:
                return Count(_count_locally(self._local, api, body.decoded()), "local")
            except NotExact as reason:
                logger.debug("count by the engine: %s", reason)
            except BadPrompt as error:
                raise ApiError(400, str(error), param=error.param) from None
        decoders = self._fleet.ready(EngineRole.DECODE)
        if not decoders:
            raise ApiError(503, "No decode engine is ready to count the prompt.", retry_after_s=1)
        decoder = min(decoders, key=lambda e: e.in_flight)
        return Count(await self._count_on(decoder, api, body), "engine")

    async def check(self, decoder: Engine, model: str) -> None:
        """Compare local counting with a decoder's own, once it is up; differ → count by engines, loudly."""
        if self._local is None:
            return
        samples: list[tuple[Api, dict[str, Any]]] = [
            (Api.COMPLETIONS, {"model": model, "prompt": _SAMPLE}),
            (Api.CHAT, {"model": model, "messages": [{"role": "user", "content": _SAMPLE}]}),
        ]
        for api, sample in samples:
            body = Body.parse(msgspec.json.encode(sample))
            try:
                here = _count_locally(self._local, api, sample)
                there = await self._count_on(decoder, api, body)
            except (NotExact, BadPrompt, ApiError) as reason:
                # No chat template, or no /tokenize: nothing to compare for this kind of request.
                logger.info("token count of %s not compared with %s: %s", api.value, decoder.url, reason)
                continue
            if here != there:
                self._local = None
                logger.error(
                    "token counts differ for %s: %d here, %d at %s. Every prompt is now counted by an "
                    "engine's /tokenize, which is slower; check --model-path, --tokenizer, --chat-template.",
                    api.value,
                    here,
                    there,
                    decoder.url,
                )
                return

    async def _count_on(self, engine: Engine, api: Api, body: Body) -> int:
        wanted = _TOKENIZE_FIELDS[api]
        question = body.edited({}, drop=[n for n in body.names() if n not in wanted])
        try:
            answer = await self._legs.call(engine, "POST", "/tokenize", question)
        except LegFailed as failure:
            if failure.reply is not None and failure.reply.status < 500:
                raise ApiError(
                    400, f"The engine cannot tokenize the prompt: {failure.engine_message()}"
                ) from None
            raise ApiError(503, f"The prompt could not be counted: {failure}", retry_after_s=1) from None
        return int(_COUNT.decode(answer)["count"])


def _count_locally(local: PromptCounter, api: Api, body: Mapping[str, Any]) -> int:
    return local.chat(body).count if api is Api.CHAT else local.completion(body).count
