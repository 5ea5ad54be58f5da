"""How many tokens a prompt has: counted here where that is exact, else by an engine's /tokenize."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from tandem.prompt import BadPrompt, NotExact, PromptCounter
from tandem.router import reported
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting_places import InLoop, Place
from tandem.router.counting_process import CountingProcess
from tandem.router.engines import Engine, State
from tandem.router.errors import ApiError, unavailable
from tandem.router.fleet import Fleet
from tandem.router.helper_process import Unavailable
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


class _Differing(NamedTuple):
    """An engine that counts otherwise."""

    losses: int
    names: frozenset[str]
    """The models that it serves."""


class _Tokenized(msgspec.Struct):
    """An engine's answer to /tokenize."""

    count: int
    tokens: list[int] = []


_TOKENIZED = msgspec.json.Decoder(_Tokenized)

# How many decoders are asked for one count: one may just have died.
_ASKED = 2

# Bytes of a body for each token of the longest context, beyond which it is not counted. A token of text has
# four in English, and a character escaped in JSON six or twelve.
_BYTES = 32
# Tokens of that context where no engine has told it.
_LONGEST = 262_144

# Odd on purpose: several scripts, runs of spaces, digits, a special token's text and code.
_SAMPLE = "Tandem counts  tokens:\n\n\tnaïve Übung, 数える, 🚲 3.14159 == `x[i]` </s> <|im_end|> 1,000,000"


class OverContext(Exception):
    """A body is so large that no engine can take it. It was not counted, which could take minutes."""


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
        the loop. `models`: names of those that are counted here; none: all."""
        self._here: Place | None = None if local is None else InLoop(local, process, large)
        self._models = frozenset(models)
        self._differing: dict[Engine, _Differing] = {}
        self._by_engines: frozenset[str] = frozenset()  # the models of those
        self._nameless_here = False  # whether a prompt for no model in particular is counted here
        self._unavailable = ""  # why nothing could be counted here the last time
        self._legs = legs
        self._fleet = fleet
        fleet.on_change(self._fleet_changed)
        self._fleet_changed()

    @property
    def here(self) -> Place | None:
        """Where prompts are counted without asking an engine, if anywhere."""
        return self._here

    @property
    def differing(self) -> dict[Engine, int]:
        """Engines that were found to count otherwise than here, and how often they had been lost by then."""
        return {engine: found.losses for engine, found in self._differing.items()}

    async def count(self, api: Api, body: Body) -> Prompt:
        """Count a request's prompt. Raises ApiError 400 for a prompt that cannot be rendered, OverContext."""
        model = body.get("model")
        group = self._fleet.group(model if isinstance(model, str) else None)
        if len(body.data) > _BYTES * (group.max_model_len or _LONGEST):
            raise OverContext
        if self._here is not None and self._counts(model):
            try:
                ids = await self._here.count(api, body)
                self._unavailable = ""
                return Prompt(len(ids), ids)
            except Unavailable as reason:
                if self._unavailable != str(reason):
                    self._unavailable = str(reason)
                    logger.warning("prompts are counted by engines: %s", reason)
            except NotExact as reason:
                logger.debug("count by the engine: %s", reason)
            except BadPrompt as error:
                raise ApiError(400, str(error), param=error.param, quotes=True) from None
        if api is Api.COMPLETIONS and (count := body.ids) is not None:
            kept = _kept(count, body)  # ids already, which /tokenize does not take
            whole = kept == count and body.facts is None
            return Prompt(kept, body.get("prompt") if whole else None)
        if api is Api.CHAT and not ("messages" in body and body.raw("messages").startswith(b"[")):
            # An engine's /tokenize takes prompts too, and would tell a client of a chat that it lacks one.
            raise ApiError(400, "messages must be a list.", param="messages")
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
            return self._nameless_here
        return model not in self._by_engines and (not self._models or model in self._models)

    def _fleet_changed(self) -> None:
        """Work out for which models engines count, which is asked for each request."""
        self._differing = {engine: found for engine, found in self._differing.items() if not engine.left}
        self._by_engines = frozenset().union(*(found.names for found in self._differing.values()))
        self._nameless_here = not self._differing and (not self._models or self._fleet.names <= self._models)

    async def check(self, decoder: Engine, model: str) -> None:
        """Compare local counting with an engine's own, once it is up; where they differ, engines count for
        its models as long as it is there. Where no model is left for here, it is left for good."""
        compared: Place | None = None
        while self._here is not None and self._here is not compared:  # another may have come meanwhile
            compared = self._here
            if self._counts(model) and await self._differs(compared, decoder, model):
                self._differing[decoder] = _Differing(decoder.losses, decoder.model_ids | {model})
                self._fleet_changed()
        told = all(e.models for e in self._fleet.engines if e.answers)
        if told and not any(map(self._counts, self._models or self._fleet.names)):
            await self.leave()  # it is for no model here

    async def use(self, here: Place) -> Engine | None:
        """Count prompts there from now on, once the engines that generate answers are found to count alike.
        Else it is closed, and the one that does not is returned. Meanwhile engines count."""
        await self.leave()
        self._differing.clear()
        self._fleet_changed()
        compared: set[tuple[Engine, int]] = set()
        try:
            while new := [
                e for e in self._fleet.engines if _is_to_agree(e) and (e, e.losses) not in compared
            ]:
                for engine in new:
                    compared.add((engine, engine.losses))
                    names = [card["id"] for card in engine.models if "id" in card]
                    model = next(filter(self._counts, names), None)
                    if model is not None and await self._differs(here, engine, model):
                        await here.aclose()
                        return engine
        except BaseException:
            await here.aclose()
            raise
        self._here = here
        return None

    async def leave(self) -> None:
        """Have engines count everything."""
        here, self._here = self._here, None
        if here is not None:
            await here.aclose()

    async def _differs(self, here: Place, decoder: Engine, model: str) -> bool:
        samples: list[tuple[Api, dict[str, Any]]] = [
            (Api.COMPLETIONS, {"model": model, "prompt": _SAMPLE}),
            (Api.CHAT, {"model": model, "messages": [{"role": "user", "content": _SAMPLE}]}),
        ]
        for api, sample in samples:
            body = Body.parse(msgspec.json.encode(sample))
            try:
                ids = list(await here.sample(api, body))
                there = await self._tokenize(decoder, api, body)
            except (NotExact, BadPrompt, Unavailable, ApiError, LegFailed) as reason:
                # No chat template, or no /tokenize: nothing to compare for this kind of request.
                logger.warning("token count of %s not compared with %s: %s", api.value, decoder.url, reason)
                continue
            if len(ids) != there.count or ids != (there.tokens or ids):
                logger.error(
                    "token %s differ for %s: %d here, %d at %s. Every prompt of its models is now counted by "
                    "an engine's /tokenize, which is slower; %s.",
                    "ids" if len(ids) == there.count else "counts",
                    api.value,
                    len(ids),
                    there.count,
                    decoder.url,
                    here.advice,
                )
                return True
        return False

    async def _count_on(self, engine: Engine, api: Api, body: Body) -> Prompt:
        """As an engine counts it; a length that no prompt has is none.

        Raises ApiError 400 for what the engine rejects, LegFailed when it gives no answer."""
        told = await self._tokenize(engine, api, body)
        kept = _kept(told.count, body)
        # Which end is cut off is not said.
        whole = kept == told.count == len(told.tokens)
        return Prompt(reported.count(kept), told.tokens if whole else None)

    async def _tokenize(self, engine: Engine, api: Api, body: Body) -> _Tokenized:
        """As `_count_on`, without regard to what the request wants kept."""
        wanted = _TOKENIZE_FIELDS[api]
        template = {n: msgspec.Raw(body.raw(n)) for n in _AS_TEMPLATE_ARGUMENTS if body.given(n)}
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


def _is_to_agree(engine: Engine) -> bool:
    """Whether an engine's counts are compared with those made here: it generates answers now, also where it
    is suspect or others are preferred (see `groups.in_use`), and has told its models."""
    return engine.answers and engine.state is not State.WAITING and bool(engine.models)
