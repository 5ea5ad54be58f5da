"""A machine as engines see it: cores, GPUs, memory, vLLM's interpreter; and how they are shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tandem.engine.errors import MachineError
from tandem.engine.kv_transfer import Accelerator


class Core(NamedTuple):
    """A physical core: its logical CPUs (SMT siblings, never split between engines) and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True)
class Machine:
    cores: tuple[Core, ...]
    """Those this process may use, NUMA node by NUMA node."""
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""
    memory_bytes: int
    """Available now, not installed, by vLLM's reckoning."""
    accelerator: Accelerator
    """What the installed vLLM computes on."""
    python: str
    """The interpreter that runs vLLM."""
    obtainable_bytes: int | None = None
    """Memory that programs can get in all, which may be more: a machine may be given memory as it uses it.
    None: as `memory_bytes`."""
    lmcache: str | None = None
    """The version of LMCache beside vLLM."""


@dataclass(frozen=True)
class CoreShares:
    engines: tuple[tuple[Core, ...], ...]
    """In the engines' order."""
    rest: tuple[Core, ...]
    """What is left for the router; empty when everything was given out."""
    note: str | None = None


def share_cores(machine: Machine, engines: int) -> CoreShares:
    """Equal shares of physical cores, each in one NUMA node where they fit that way.

    With fewer cores than engines, engines share cores in turn, and the note says so.
    """
    if engines < 1 or not machine.cores:
        raise ValueError("there must be at least one engine and one core")
    cores = sorted(machine.cores, key=lambda core: (core.node, core.cpus))
    each = len(cores) // engines
    if each == 0:
        shared = tuple((cores[i % len(cores)],) for i in range(engines))
        note = f"{engines} engines share {_count(len(cores), 'core')}: expect both roles to be slow"
        return CoreShares(shared, (), note)
    whole = [
        tuple(node[i : i + each])
        for _, group in groupby(cores, key=lambda core: core.node)
        if (node := list(group))
        for i in range(0, len(node) - each + 1, each)
    ]
    if len(whole) < engines:  # some share has to straddle nodes: then at least keep neighbours together
        whole = [tuple(cores[i : i + each]) for i in range(0, engines * each, each)]
    shares = tuple(whole[:engines])
    given = {core for share in shares for core in share}
    return CoreShares(shares, tuple(core for core in cores if core not in given))


def share_gpus(machine: Machine, needs: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], ...]:
    """The GPUs of each engine, from (engine name, GPUs it needs) in order.

    Raises MachineError when there are too few.
    """
    total = sum(count for _, count in needs)
    if total > len(machine.gpus):
        wanted = ", ".join(f"{name} {count}" for name, count in needs)
        raise MachineError(
            f"the endpoint needs {_count(total, 'GPU')} ({wanted}: tensor × pipeline parallel size each) and "
            f"this machine has {len(machine.gpus)}. Lower --tensor-parallel-size, --pipeline-parallel-size "
            "or the replicas" + ("." if machine.gpus else ", or install vLLM's CPU build.")
        )
    remaining = iter(machine.gpus)
    return tuple(tuple(next(remaining) for _ in range(count)) for _, count in needs)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
