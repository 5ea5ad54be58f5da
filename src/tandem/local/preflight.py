"""Everything that would keep an endpoint from starting, looked for before a process is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api import Endpoint
from tandem.engine import EngineLaunch, Machine
from tandem.local import builtin
from tandem.local.errors import LocalError, ResourceError
from tandem.local.fit import fit_problems
from tandem.local.folders import write_problem
from tandem.local.memory import Need, float_bytes, kv_cache_bytes, l1_bytes, memory_problem
from tandem.local.model_folder import architecture_problem, read_config, read_files
from tandem.local.ports import require_free
from tandem.local.vllm_flags import find_sources
from tandem.local.weights import Weights


@dataclass(frozen=True)
class Start:
    """What is about to be started, and where."""

    endpoint: Endpoint
    engines: Sequence[EngineLaunch]
    machine: Machine
    model: Path
    host: str
    port: int
    logs: Path
    cache: Path
    """Where the built-in model is kept."""

    @property
    def converts(self) -> bool:
        """Whether the model is the built-in one, which has yet to be converted."""
        return self.is_builtin and not (self.model / "config.json").is_file()

    @property
    def is_builtin(self) -> bool:
        return self.model == builtin.builtin_folder(self.cache)


def problems(start: Start, *, memory: bool = True) -> list[LocalError]:
    """All that is wrong, each with what to do. `memory`: whether too little of it is a problem."""
    return [*_port(start), *_logs(start), *_model(start, memory)]


def _port(start: Start) -> Iterator[LocalError]:
    try:
        require_free(start.port, start.host)
    except LocalError as error:
        yield error


def _logs(start: Start) -> Iterator[LocalError]:
    if problem := write_problem(start.logs, "logs"):
        yield problem


def _model(start: Start, memory: bool) -> Iterator[LocalError]:
    args = start.engines[0].argv
    config: dict[str, Any] = {}
    if start.converts:
        yield from builtin.conversion_problems(start.cache)
        weights = Weights(floats=builtin.PARAMETERS)
    else:
        weights = read_files(start.model, args)
        try:
            config = read_config(start.model)
            told = [architecture_problem(start.model, config, args), *weights.problems]
        except ValueError as error:
            told = [str(error), *weights.problems]
        if not start.is_builtin:  # one that is damaged is made again
            yield from (ResourceError(problem) for problem in told if problem)
    vllm = find_sources(start.machine.python)
    yield from fit_problems(start.endpoint, start.engines, config, vllm)
    if memory and start.machine.accelerator == "cpu":
        needed = [_need(engine, weights, config) for engine in start.engines]
        machine = start.machine
        obtainable = machine.obtainable_bytes
        if problem := memory_problem(needed, machine.memory_bytes if obtainable is None else obtainable):
            yield problem


def _need(engine: EngineLaunch, weights: Weights, config: dict[str, Any]) -> Need:
    return Need(
        engine.role.value,
        weights.loaded_bytes(float_bytes(engine.argv)),
        kv_cache_bytes(engine.argv, engine.env, config) or 0,
        l1_bytes(engine.env),
    )
