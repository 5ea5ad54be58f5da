"""Over what KV goes between engines, as those that move it tell in their logs.

UCX tells it when two engines connect, in tables (`UCX_PROTO_INFO`); libfabric tells when an engine starts
what its devices are (`NIXL_LOG_LEVEL`). Of one connection UCX may tell several times; the last counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.operator.texts import shortened

Moves = Literal["read", "write"]
"""What moves KV: decoders read it (NIXL), or prefillers write it (LMCache)."""

MOVER: Mapping[str, tuple[str, Moves]] = {"nixl": ("decode", "read"), "lmcache": ("prefill", "write")}
"""By connector: the component whose engines move KV, and how."""

UNKNOWN = "unknown"
MOST_LANES = 4
"""Devices that are named."""
LONGEST_LINE = 2000
"""Characters of a line that is looked at: UCX's have some 150. Looking takes time by the square of it, and
what engines log is not ours."""
LONGEST_SUMMARY = 1000

# "[1796031124.459559] [vm:12271:0]   | …  |": host, process and thread, and what is between the borders.
_ROW = re.compile(r"\[[^\[\]]*:(?P<process>\d+)\s*:\d+\]\s+\|(?P<cells>.*)\|\s*$")
_CONNECTION = re.compile(r"(?P<kind>self|intra-node|inter-node) cfg#\d+$")
_OPERATION = re.compile(r"remote memory (?P<verb>read|write) by \w+\*(?P<many>\(multi\))?")
_LANE = re.compile(r"\b(?P<transport>[a-z]\w*)/(?P<device>[\w.:-]+)")
_DEVICES = re.compile(r"\bDiscovered (?P<count>\d+) (?P<kind>[\w-]+)(?: \w+)? devices\b")

_SHARED_MEMORY = ("sysv", "posix", "cma", "knem", "xpmem")
_RDMA = re.compile(r"(rc|dc|ud|gga)(_|$)")
_LIBFABRIC = {
    "efa": "EFA",
    "efa-direct": "EFA",
    "verbs": "RDMA",
    "tcp": "TCP",
    "sockets": "TCP",
    "socket": "TCP",
}


@dataclass
class _Table:
    """What was read of a table of one process so far."""

    name: str = ""
    kind: str = ""
    verb: str = ""
    many: bool = False


def transports(log: str, moves: Moves) -> tuple[str, ...]:
    """What an engine's log tells, in words: `TCP (tcp/eth0)`, `shared memory (cma/memory)`,
    `EFA (4 devices)`. Several where it differs between the engine's peers; none where nothing is told yet."""
    told: dict[tuple[str, ...], str] = {}
    tables: dict[str, _Table] = {}
    for line in log.splitlines():
        if len(line) > LONGEST_LINE:
            continue
        row = _ROW.search(line)
        if row is not None:
            process = row["process"]
            found = _read(tables.setdefault(process, _Table()), row["cells"], moves)
            if found is not None:
                told[process, found[0]] = found[1]
        elif devices := _DEVICES.search(line):
            kind = devices["kind"]
            told["libfabric",] = f"{_LIBFABRIC.get(kind.lower(), kind)} ({devices['count']} devices)"
    return tuple(sorted(set(told.values())))


def summary(told: Iterable[tuple[str, ...]]) -> str | None:
    """Of several engines' transports; None where none has told any."""
    counts = Counter(transport for engine in told for transport in engine)
    if not counts:
        return None
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{name} of {count} engine{'s' * (count > 1)}" for name, count in ordered]
    return shortened("; ".join(words) if len(words) > 1 else ordered[0][0], LONGEST_SUMMARY)


def _read(table: _Table, text: str, moves: Moves) -> tuple[str, str] | None:
    """A row of a process's table. Returns the connection and its transport where the row has it: that for
    the largest transfers, which is the last."""
    cells = [cell.strip() for cell in text.split("|")]
    if len(cells) == 1:
        if connection := _CONNECTION.search(cells[0]):
            table.name, table.kind, table.verb = cells[0], connection["kind"], ""
        elif operation := _OPERATION.match(cells[0]):
            table.verb, table.many = operation["verb"], operation["many"] is not None
        return None
    if len(cells) != 3 or not cells[0].endswith("inf") or not _of_hand_offs(table, moves):
        return None
    lanes = dict.fromkeys(f"{lane['transport']}/{lane['device']}" for lane in _LANE.finditer(cells[2]))
    if not lanes:
        return None
    kinds = dict.fromkeys(_kind(lane.partition("/")[0]) for lane in lanes)
    named = [*list(lanes)[:MOST_LANES], *(["…"] if len(lanes) > MOST_LANES else [])]
    return table.name, f"{' and '.join(kinds)} ({', '.join(named)})"


def _of_hand_offs(table: _Table, moves: Moves) -> bool:
    """Whether a table is about moving KV. An engine also writes to itself as it starts, on a connection that
    may be called intra-node; what NIXL moves for hand-offs, it moves as one of many (`multi`)."""
    if table.verb != moves or table.kind in ("", "self"):
        return False
    return table.many or moves == "read" or table.kind == "inter-node"


def _kind(transport: str) -> str:
    """UCX's transports: https://openucx.readthedocs.io/en/master/faq.html lists them."""
    if transport == "tcp":
        return "TCP"
    if transport in _SHARED_MEMORY:
        return "shared memory"
    if transport.startswith("srd"):
        return "EFA"
    if _RDMA.match(transport):
        return "RDMA"
    if transport.endswith("_ipc"):
        return "GPU to GPU"
    return transport
