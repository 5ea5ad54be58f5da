"""Which engines take a request, and by what path. Nothing is sent here; nothing waits.

The decoder comes first: the connector may need room on it. Then the prefiller, among those that KV has been
seen to go from to this decoder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.config import RouterConfig
from tandem.router.budgets import Budgets, Reservation, possible
from tandem.router.classify import UNCOUNTED
from tandem.router.connectors import Claim, Connector
from tandem.router.counting import Counter, OverContext
from tandem.router.engines import Engine, EngineRole
from tandem.router.errors import ApiError, unavailable
from tandem.router.explain import scores
from tandem.router.facts import decode_only_of
from tandem.router.fleet import Fleet
from tandem.router.groups import NOBODY, Candidates, Group
from tandem.router.job import Job, Path, Reason
from tandem.router.plausible import is_plausible
from tandem.router.strategies import DecoderScore, OutputEstimate, Space, Strategy

logger = logging.getLogger("tandem.router")


_SAID = 8  # engines whose trouble one line tells


class FallBack(Exception):
    """A decoder has to serve alone."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Pair:
    """The engines of one attempt, and what is reserved on them."""

    decoder: Engine
    prefiller: Engine
    reservation: Reservation


class Choosing:
    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        counter: Counter,
        connector: Connector,
        budgets: Budgets,
        strategy: Strategy,
        decoders: DecoderScore,
    ) -> None:
        """`strategy` chooses prefillers, and engines without a role; `decoders` chooses decode engines."""
        self._config = config
        self._fleet = fleet
        self._counter = counter
        self._connector = connector
        self._budgets = budgets
        self._strategy = strategy
        self._decoders = decoders
        self._counts_all = connector.counts or strategy.reads_prompts
        self._session_headers = [name.lower().encode() for name in config.session_headers]
        self.outputs = OutputEstimate()
        fleet.on_loss(strategy.gone)
        fleet.on_loss(decoders.gone)

    @property
    def strategy(self) -> str:
        """The strategy's name, as it is logged."""
        return type(self._strategy).__name__

    def group(self, job: Job) -> Group:
        return self._fleet.group(job.model)

    async def decide(self, job: Job) -> None:
        """Count the prompt where that matters, and choose the path: sets the job's prompt, path and reason.

        Raises ApiError where no engine can serve it now, or the prompt cannot be counted."""
        threshold = self._config.routing_threshold
        decode_only = decode_only_of(job.api, job.body)
        job.expected_output = self.outputs.expect(job.max_tokens)
        if not self.group(job).decoders:
            raise self.not_ready(job)
        matters = decode_only is None and threshold > 0 and self.group(job).prefillers_exist
        metered = job.caller is not None and job.caller.metered
        if decode_only not in UNCOUNTED and (matters or job.explain or self._counts_all or metered):
            try:
                job.prompt = await self._counter.count(job.api, job.body)
            except OverContext:
                job.reason = Reason.OVER_CONTEXT
        job.prompt = replace(job.prompt, space=self._space(job), session=self._session(job))
        if self._strategy.reads_prompts:
            for _ in job.prompt.chaining(self._config.kv_block_size):
                await asyncio.sleep(0)  # streams go first
        if decode_only is not None:
            job.reason = decode_only
            logger.info("Conditional routing: reason=%s, disaggregate=False", job.reason)
            return
        if job.reason == Reason.OVER_CONTEXT:
            logger.info(
                "Conditional routing: estimated_tokens=not counted, reason=%s, disaggregate=False", job.reason
            )
            return
        tokens = effective = job.prompt.tokens
        group = self.group(job)
        if self._config.uncached_threshold and tokens is not None and group.pairable:
            # As though it were to compute the prompt: of two, the one that has more of it.
            job.decode_choice = self._decoders.choose(job.prompt, group.pairable.now())
            effective = tokens - job.decode_choice.hit_tokens
        job.effective_tokens = effective
        long = effective is None or effective >= threshold
        # Where nobody could hand over, nothing is to be compared: the reason is told in its place.
        alone = long and not group.prefillers_exist
        cached = "" if tokens == effective else f", full={tokens}, cached={(tokens or 0) - (effective or 0)}"
        logger.info(
            "Conditional routing: estimated_tokens=%s, %s, disaggregate=%s%s",
            "not counted" if effective is None else effective,
            f"reason={Reason.NO_PREFILLERS_CONFIGURED}" if alone else f"threshold={threshold}",
            long and not alone,
            cached,
        )
        if not long:
            job.reason = Reason.SHORT if tokens == effective or (tokens or 0) < threshold else Reason.CACHED
            return
        self.disaggregate(job)

    def disaggregate(self, job: Job) -> None:
        """Choose the path of a prompt that belongs on a prefiller: the job's path and reason."""
        group, tokens = self.group(job), job.prompt.tokens
        if self._over_context(job):
            job.reason = Reason.OVER_CONTEXT
        elif not group.prefillers_exist:
            job.reason = Reason.NO_PREFILLERS_CONFIGURED
        elif not is_plausible(job.api, job.body, tokens, group.max_model_len):
            job.fall_back(Reason.DOUBTFUL)
        elif (most := self._connector.longest) is not None and job.tokens > most:
            job.fall_back(Reason.OVER_STEP)
        else:
            job.path, job.reason = Path.DISAGGREGATED, Reason.THRESHOLD

    def pair(self, job: Job, *, take: bool = True) -> Pair | None:
        """A decoder and a prefiller for one attempt, reserved; None: not now. Raises FallBack when waiting
        cannot help, and ApiError when there is no decoder.

        `take`: else nothing is reserved or remembered, to see what would be chosen."""
        self._usable(job, self.group(job).decoders)
        candidates = self._usable_pairs(job)
        if not candidates:
            raise FallBack(Reason.PREFILL_FAILED if job.failed_prefillers else Reason.NO_PREFILLER)
        choice = self._decoders.choose(job.prompt, candidates, computes=False)
        claims = self._claims(job, choice.engine)
        if not self._budgets.fit(claims):
            needed = {d: self._claims(job, d) for d in candidates}
            if not any(map(possible, needed.values())):
                raise FallBack(Reason.OVER_BUFFER)
            with_room = [d for d, each in needed.items() if self._budgets.fit(each)]
            if not with_room:
                if job.failed_decoders:  # it shall not keep others waiting for the engines that it has left
                    raise FallBack(Reason.NO_ROOM)
                return None
            choice = self._decoders.choose(job.prompt, with_room, computes=False)
            claims = needed[choice.engine]
        job.decode_choice = choice
        job.prefill_choice = self._strategy.choose(job.prompt, self._prefillers(job, choice.engine))
        prefiller = job.prefill_choice.engine
        if not take:
            return Pair(choice.engine, prefiller, self._budgets.take([]))
        self._log_choices(job)
        self._decoders.sent(job.prompt, choice.engine)
        self._strategy.sent(job.prompt, prefiller)
        return Pair(choice.engine, prefiller, self._budgets.take(claims))

    def alone(self, job: Job, *, take: bool = True) -> Engine:
        """The engine that computes the prompt and answers. Raises ApiError 503 when there is none."""
        candidates = self._usable(job, self.group(job).decoders)
        chooser = self._strategy if candidates[0].role is EngineRole.BOTH else self._decoders
        made = job.decode_choice if job.reason == Reason.CACHED else None
        if made is None or made.engine not in candidates:
            job.decode_choice = made = chooser.choose(job.prompt, candidates)
        job.prefill_choice = None
        if take:
            self._log_choices(job)
            refused = job.reason in (Reason.DOUBTFUL, Reason.OVER_CONTEXT) or self._over_context(job)
            if not refused:  # else nothing is computed
                chooser.sent(job.prompt, made.engine)
        return made.engine

    def answered(self, job: Job, engine: Engine) -> None:
        """An engine has begun to answer, or has answered where that is not streamed."""
        if engine.role is EngineRole.DECODE:
            self._decoders.computed(job.prompt, engine)

    def others(self, job: Job) -> bool:
        """Whether there is an engine in use that this request has not failed on."""
        return any(d not in job.failed_decoders for d in self.group(job).decoders.all)

    def not_ready(self, job: Job) -> ApiError:
        engines = sorted((e for e in self.group(job).members if e.answers), key=lambda e: e.url)
        whys = [f"{e.url}: {e.why or 'failed this request'}" for e in engines]
        logger.warning("%s cannot be served: %s", job.id, "; ".join(whys[:_SAID]) or "there is no engine")
        return unavailable("The endpoint is not ready to serve this request. Try again.")

    def _over_context(self, job: Job) -> bool:
        """Whether no engine takes a prompt that is so long."""
        tokens, longest = job.prompt.tokens, self.group(job).max_model_len
        return tokens is not None and longest is not None and tokens >= longest

    def _usable(self, job: Job, decoders: Candidates) -> list[Engine]:
        """Those of some decoders that this request has not failed on. Raises ApiError 503 when there is
        none."""
        usable = decoders.now()
        if job.failed_decoders:
            usable = [d for d in decoders.all if d not in job.failed_decoders]
        if not usable:
            raise self.not_ready(job)
        return usable

    def _usable_pairs(self, job: Job) -> list[Engine]:
        """Decoders that this request may be handed over to."""
        pairable = self.group(job).pairable
        if not job.failed_decoders and not job.failed_prefillers:
            return pairable.now()
        usable = (d for d in pairable.all if d not in job.failed_decoders)
        return [d for d in usable if self._prefillers(job, d)]

    def _prefillers(self, job: Job, decoder: Engine) -> Sequence[Engine]:
        proved = self.group(job).prefillers.get(decoder, NOBODY)
        if not job.failed_prefillers and not job.doubted_prefillers:
            return proved.now()
        usable = [p for p in proved.all if p not in job.failed_prefillers]
        return [p for p in usable if p not in job.doubted_prefillers] or usable

    def _claims(self, job: Job, decoder: Engine) -> list[Claim]:
        return list(self._connector.reservation(job.tokens, decoder))

    def _space(self, job: Job) -> Space:
        """What keeps its KV apart beside the tokens."""
        salt = job.body.get("cache_salt")
        lora = job.model if job.model in self.group(job).adapters else None
        return Space(lora, salt if isinstance(salt, str) else None)

    def _session(self, job: Job) -> str | None:
        for name in self._session_headers:
            if value := job.request.header(name):
                return _own(value.decode("latin-1"), job)
        if self._config.session_field is not None:
            named = job.body.get(self._config.session_field)
            return _own(named, job) if isinstance(named, str) and named else None
        return None

    def _log_choices(self, job: Job) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            for role, choice in (("decoder", job.decode_choice), ("prefiller", job.prefill_choice)):
                if choice is not None:
                    logger.debug(
                        "%s %s %s: %s, %d tokens expected in its cache; compared (lowest wins): %s",
                        job.id,
                        role,
                        choice.engine.url,
                        choice.why,
                        choice.hit_tokens,
                        scores(choice),
                    )


def _own(session: str, job: Job) -> str:
    """A session's name among those of all keys: another key's session of that name is another one."""
    return session if job.caller is None else f"{job.caller.name}\0{session}"
