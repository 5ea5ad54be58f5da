"""How many tokens a prompt has: counted here where that is exact, else by an engine's /tokenize."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from tandem.prompt import BadPrompt, NotExact, PromptCounter, Tokens
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting_process import CountingProcess, Unavailable
from tandem.router.engines import Engine
from tandem.router.errors import ApiError, unavailable
from tandem.router.fleet import Fleet
from tandem.router.legs import LegFailed, Legs
from tandem.router.strategies import Prompt

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

# Fields of a chat request that /tokenize does not have, and that reach the template as arguments.
_AS_TEMPLATE_ARGUMENTS = ("documents", "reasoning_effort")


class _Tokenized(msgspec.Struct):
    """An engine's answer to /tokenize."""

    count: int
    tokens: list[int] = []


_TOKENIZED = msgspec.json.Decoder(_Tokenized)

# What a byte of a list of token ids costs the loop, in bytes of text.
_IDS_COST = 8

# How many decoders are asked for one count: one may just have died.
_ASKED = 2

# Odd on purpose: several scripts, runs of spaces, digits, a special token's text and code.
_SAMPLE = "Tandem counts  tokens:\n\n\tnaïve Übung, 数える, 🚲 3.14159 == `x[i]` </s> <|im_end|> 1,000,000"


class Counter:
    """Counts prompts exactly: here where a tokenizer was loaded, and `check` found it right."""

    def __init__(
        self,
        local: PromptCounter | None,
        legs: Legs,
        fleet: Fleet,
        process: CountingProcess | None = None,
        large: int = 0,
        models: Collection[str] = (),
    ) -> None:
        """`process` counts bodies of `large` bytes or more; without it, all that `local` counts is counted in
        the loop. `models`: names of those that `local` is for; none: for all."""
        self._local = local
        self._models = frozenset(models)
        self._differing: set[str] = set()  # models that engines count otherwise
        self._legs = legs
        self._fleet = fleet
        self._process = process
        self._large = large

    async def count(self, api: Api, body: Body) -> Prompt:
        """Count a request's prompt. Raises ApiError 400 for a prompt that cannot be rendered."""
        if self._local is not None and self._counts(body.get("model")):
            try:
                if self._process is not None and self._is_large(api, body):
                    ids = await self._process.count(api, body.data)
                else:
                    ids = _render(self._local, api, body.decoded()).ids
                return Prompt(len(ids), ids)
            except Unavailable as reason:
                logger.warning("a long prompt is counted by an engine: %s", reason)
            except NotExact as reason:
                logger.debug("count by the engine: %s", reason)
            except BadPrompt as error:
                raise ApiError(400, str(error), param=error.param, quotes=True) from None
        if api is Api.COMPLETIONS and isinstance(ids := body.get("prompt"), list):
            kept = _kept(len(ids), body)  # ids already, which /tokenize does not take
            return Prompt(kept, ids if kept == len(ids) else None)
        model = body.get("model")
        group = self._fleet.group(model if isinstance(model, str) else None)
        decoders = sorted(group.decoders.all, key=lambda e: e.in_flight)
        if not decoders:
            raise unavailable("No engine is ready to count the prompt.")
        for decoder in decoders[:_ASKED]:
            try:
                return await self._count_on(decoder, api, body)
            except LegFailed as failure:
                logger.warning("a prompt could not be counted: %s", failure)
                if failure.unreachable:
                    self._fleet.lost(decoder, f"cannot be reached: {failure}")
        raise unavailable("The prompt could not be counted. Try again.")

    def _counts(self, model: object) -> bool:
        """Whether prompts for a model are counted here."""
        if model is None:  # the engines' own, whichever it is
            return not self._differing and (not self._models or self._fleet.names <= self._models)
        return model not in self._differing and (not self._models or model in self._models)

    def _is_large(self, api: Api, body: Body) -> bool:
        size = len(body.data)
        if size >= self._large:
            return True
        # A number is an object, so a list of ids costs many times what a text of its size does.
        return (
            api is Api.COMPLETIONS
            and size * _IDS_COST >= self._large
            and body.picked(("prompt",)).startswith(b'{"prompt":[')
        )

    async def check(self, decoder: Engine, model: str) -> None:
        """Compare local counting with an engine's own, once it is up; where they differ, engines count for
        its models from then on."""
        if self._local is None:
            return
        if self._counts(model) and await self._differs(self._local, decoder, model):
            self._differing |= decoder.model_ids | {model}
        told = all(e.models for e in self._fleet.engines if e.answers)
        if told and not any(map(self._counts, self._models or self._fleet.names)):
            self._local = None  # it is for no model here
            if self._process is not None:
                await self._process.aclose()

    async def _differs(self, local: PromptCounter, decoder: Engine, model: str) -> bool:
        samples: list[tuple[Api, dict[str, Any]]] = [
            (Api.COMPLETIONS, {"model": model, "prompt": _SAMPLE}),
            (Api.CHAT, {"model": model, "messages": [{"role": "user", "content": _SAMPLE}]}),
        ]
        for api, sample in samples:
            body = Body.parse(msgspec.json.encode(sample))
            try:
                here = _render(local, api, sample).ids
                there = await self._tokenize(decoder, api, body)
            except (NotExact, BadPrompt, ApiError, LegFailed) as reason:
                # No chat template, or no /tokenize: nothing to compare for this kind of request.
                logger.warning("token count of %s not compared with %s: %s", api.value, decoder.url, reason)
                continue
            if len(here) != there.count or here != (there.tokens or here):
                logger.error(
                    "token %s differ for %s: %d here, %d at %s. Every prompt of its models is now counted by "
                    "an engine's /tokenize, which is slower; check --model-path, --tokenizer, "
                    "--chat-template, --counted-model.",
                    "ids" if len(here) == there.count else "counts",
                    api.value,
                    len(here),
                    there.count,
                    decoder.url,
                )
                return True
        return False

    async def _count_on(self, engine: Engine, api: Api, body: Body) -> Prompt:
        """Raises ApiError 400 for what the engine rejects, LegFailed when it gives no answer."""
        told = await self._tokenize(engine, api, body)
        kept = _kept(told.count, body)
        # Which end is cut off is not said.
        whole = kept == told.count == len(told.tokens)
        return Prompt(kept, told.tokens if whole else None)

    async def _tokenize(self, engine: Engine, api: Api, body: Body) -> _Tokenized:
        """As `_count_on`, without regard to what the request wants kept."""
        wanted = _TOKENIZE_FIELDS[api]
        template = {n: body.get(n) for n in _AS_TEMPLATE_ARGUMENTS if body.get(n) is not None}
        given = body.get("chat_template_kwargs")
        if template and isinstance(given, dict | None):
            changes = {"chat_template_kwargs": {**template, **(given or {})}}
        else:
            changes = {}
        question = body.edited(changes, drop=[n for n in body.names() if n not in wanted])
        try:
            answer = await self._legs.call(engine, "POST", "/tokenize", question)
        except LegFailed as failure:
            if failure.reply is not None and failure.reply.status < 500:
                said = f"The engine cannot tokenize the prompt: {failure.engine_message()}"
                raise ApiError(400, said, quotes=True) from None
            raise
        try:
            return _TOKENIZED.decode(answer)
        except msgspec.DecodeError as error:
            raise LegFailed(engine, "bad_reply", f"{engine.url}/tokenize answers nonsense: {error}") from None


def _kept(count: int, body: Body) -> int:
    """How many of a prompt's tokens the request wants kept."""
    most = body.get("truncate_prompt_tokens")
    return min(count, most) if isinstance(most, int) and most > 0 else count


def _render(local: PromptCounter, api: Api, body: Mapping[str, Any]) -> Tokens:
    return local.chat(body) if api is Api.CHAT else local.completion(body)
