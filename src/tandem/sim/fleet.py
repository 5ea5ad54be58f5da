"""Many engines in one process and one event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.sim.args import VllmArgs
from tandem.sim.build import ANSWER_TOKENS, Place, build, vocabulary
from tandem.sim.clock import Clock
from tandem.sim.cost import CostProfile
from tandem.sim.handoff import Network
from tandem.sim.server import EngineServer, Listen
from tandem.sim.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to be."""

    args: VllmArgs
    port: int = 0
    side_channel: tuple[str, int] | None = None
    """None: known to this process only, under a port that it alone uses."""
    faults: str = ""
    events_offset: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the fleet's."""


class Fleet:
    """`async with Fleet([...]) as fleet:` serves them; `fleet.engines` in the order of their specs."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        host: str = "127.0.0.1",
        profile: CostProfile | None = None,
        time_scale: float = 1.0,
        answer_tokens: tuple[int, int] = ANSWER_TOKENS,
        environment: Mapping[str, str] | None = None,
        network: Network | None = None,
        serves_model_files: bool = False,
    ) -> None:
        """`network`: of another fleet whose engines are to meet these without TCP; it is not closed here.
        `serves_model_files`: those of their tokenizers, as the proxy of a model pod does."""
        self.engines: list[EngineServer] = []
        self.on_crash: Callable[[], None] = lambda: None
        """Called after an engine died."""
        self._specs = specs
        self._host = host
        self._profile = profile or CostProfile()
        self._time_scale = time_scale
        self._answer_tokens = answer_tokens
        self._environment = os.environ if environment is None else environment
        self._serves_model_files = serves_model_files
        self._owns_network = network is None
        self.network = network or Network()

    async def __aenter__(self) -> Fleet:
        """Raises UsageError, LoadError or OSError; nothing is left running then."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))
        if self._owns_network:
            await self.network.close()

    async def _start(self) -> None:
        clock = Clock(self._time_scale)
        known: dict[object, Vocabulary] = {}  # engines of one model share its tokenizer
        for i, spec in enumerate(self._specs):
            key = _vocabulary_key(spec.args)
            if key not in known:
                known[key] = vocabulary(spec.args, self._answer_tokens)
            server = build(
                spec.args,
                self._profile,
                known[key],
                Place(
                    Listen(self._host, spec.port),
                    spec.side_channel or (self._host, -1 - i),
                    spec.side_channel is not None,
                    spec.events_offset,
                ),
                clock=clock,
                network=self.network,
                environment={**self._environment, **spec.environment},
                on_crash=lambda: self.on_crash(),
                serves_model_files=self._serves_model_files,
            )
            self.engines.append(server)
            await server.start()
            if spec.faults:
                await server.set_faults(spec.faults)


def _vocabulary_key(args: VllmArgs) -> object:
    kwargs = tuple(sorted((k, str(v)) for k, v in args.default_chat_template_kwargs.items()))
    return (
        args.model,
        args.tokenizer,
        args.chat_template,
        args.content_format,
        args.max_model_len,
        args.exclude_tools_when_tool_choice_none,
        kwargs,
    )
