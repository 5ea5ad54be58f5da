"""Over what KV goes is read from what engines log. The tables are those that vLLM 0.32 with NIXL 1.5.1 logged
over TCP and shared memory; those for GPUs and network cards are the same with other devices."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.operator.control.transport import LONGEST_SUMMARY, Moves, summary, transports

START = """\
(EngineCore pid=32) INFO 11-30 09:51:53 [base_worker.py:515] Initializing NIXL wrapper
2026-11-30 09:51:54 NIXL INFO    _api.py:405 Backend UCX was instantiated
INFO:     10.244.2.1:35574 - "GET /health HTTP/1.1" 200 OK
"""
WRITE = "remote memory write by ucp_put* from host memory to host"
WRITE_MANY = "remote memory write by ucp_put*(multi) from host memory to host"
READ = "remote memory read by ucp_get*(multi) into host memory from host"
ITSELF = ("self cfg#0", "intra-node cfg#0")
PEER = "inter-node cfg#1"


def table(connection: str, operation: str, *rows: tuple[str, str, str], process: int = 32) -> str:
    """As UCX 1.23 logs it."""
    agent = "210b578c-660a-412c-b2da-b65ac0f"
    cells = [("Range", "Description", "Config"), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    whole = max(sum(widths) + 6, len(operation), len(f"{agent} {connection}"))
    widths[2] += whole - sum(widths) - 6
    border = f"+{'+'.join('-' * (width + 2) for width in widths)}+"
    lines = [
        border,
        *(f"| {text:<{whole}} |" for text in (f"{agent} {connection}", operation)),
        border,
        f"| {' | '.join(_centred(text, width) for text, width in zip(cells[0], widths, strict=True))} |",
        border,
        *(
            f"| {' | '.join(f'{text:<{width}}' for text, width in zip(row, widths, strict=True))} |"
            for row in rows
        ),
        border,
    ]
    head = f"[1796032319.389899] [decode-real-7898b998b7-wwg4j:{process:<5}:1]   "
    return "".join(f"{head}{line}\n" for line in lines)


def _centred(text: str, width: int) -> str:
    return f"{' ' * ((width - len(text)) // 2)}{text}".ljust(width)


def whole(lane: str) -> tuple[str, str, str]:
    return "0..inf", "zero-copy", lane


def started(lane: str = "tcp/eth0") -> str:
    """An engine that has connected to itself, and with another one."""
    return START + "".join(table(connection, WRITE, whole(lane)) for connection in (*ITSELF, PEER))


LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize(
    ("file", "moves", "told"),
    [
        # A decoder in a pod, from its start to its first hand-off; the prefiller is on another node.
        ("decode-tcp", "read", ("TCP (tcp/eth0)",)),
        # NIXL in a process of its own, which has written to another one of the machine.
        ("write-shared-memory", "write", ("shared memory (cma/memory)",)),
        ("write-shared-memory", "read", ()),
    ],
)
def test_what_recorded_logs_tell(file: str, moves: Moves, told: tuple[str, ...]) -> None:
    log = (LOGS / f"{file}.txt").read_text("utf-8")
    assert transports(log, moves) == told


def test_the_tables_here_are_as_ucx_writes_them() -> None:
    """But for their heads."""
    recorded = (LOGS / "decode-tcp.txt").read_text("utf-8")
    made = table("inter-node cfg#1", READ, ("0..inf", "software emulation", "tcp/eth0"))
    assert _without_heads(made) in _without_heads(recorded)


def _without_heads(log: str) -> str:
    return "\n".join(line.rpartition("]   ")[2] for line in log.splitlines())


CASES: dict[str, tuple[str, Moves, tuple[str, ...]]] = {
    "nothing yet": (START, "read", ()),
    "an engine that is connected but has fetched nothing": (started(), "read", ()),
    "a decoder that has fetched": (
        started() + table(PEER, READ, whole("tcp/eth0")),
        "read",
        ("TCP (tcp/eth0)",),
    ),
    "of one machine": (
        started("cma/memory") + table("intra-node cfg#1", READ, whole("cma/memory")),
        "read",
        ("shared memory (cma/memory)",),
    ),
    "a prefiller that has written": (
        START
        + "".join(table(connection, WRITE, whole("tcp/eth0")) for connection in ITSELF)
        + table("intra-node cfg#1", WRITE_MANY, whole("sysv/memory")),
        "write",
        ("shared memory (sysv/memory)",),
    ),
    "a prefiller that is connected to another node": (started(), "write", ("TCP (tcp/eth0)",)),
    "an engine that writes to itself alone": (
        START + "".join(table(connection, WRITE, whole("cma/memory")) for connection in ITSELF),
        "write",
        (),
    ),
    "the largest transfers count": (
        table(PEER, READ, ("0..4096", "short", "tcp/eth0"), ("4097..inf", "zero-copy", "rc_mlx5/mlx5_0:1")),
        "read",
        ("RDMA (rc_mlx5/mlx5_0:1)",),
    ),
    "the last counts": (
        table(PEER, READ, whole("tcp/eth0")) + table(PEER, READ, whole("srd/rdmap0s6:1")),
        "read",
        ("EFA (srd/rdmap0s6:1)",),
    ),
    "over several devices": (
        table(PEER, READ, whole(" and ".join(f"20% on rc_mlx5/mlx5_{i}:1/path0" for i in range(5)))),
        "read",
        ("RDMA (rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1, rc_mlx5/mlx5_2:1, rc_mlx5/mlx5_3:1, …)",),
    ),
    "between GPUs of a node": (
        table("intra-node cfg#2", READ, whole("cuda_ipc/cuda")),
        "read",
        ("GPU to GPU (cuda_ipc/cuda)",),
    ),
    "peers that are reached differently": (
        table(PEER, READ, whole("tcp/eth0")) + table("intra-node cfg#2", READ, whole("cma/memory")),
        "read",
        ("TCP (tcp/eth0)", "shared memory (cma/memory)"),
    ),
    "ranks that log at once": (
        "".join(
            f"{a}\n{b}\n"
            for a, b in zip(
                table(PEER, READ, whole("tcp/eth0"), process=7).splitlines(),
                table(PEER, WRITE, whole("cma/memory"), process=8).splitlines(),
                strict=True,
            )
        ),
        "read",
        ("TCP (tcp/eth0)",),
    ),
    "a table that is cut off": (
        "\n".join(table(PEER, READ, whole("tcp/eth0")).splitlines()[:6]),
        "read",
        (),
    ),
    "libfabric with EFA": (
        "I1130 09:51:53.123456      32 libfabric_topology.cpp:197] Discovered 4 EFA devices\n",
        "read",
        ("EFA (4 devices)",),
    ),
    "libfabric without": (
        "I1130 09:51:53.1     32 libfabric_topology.cpp:199] Discovered 2 tcp devices (TCP fallback)\n",
        "write",
        ("TCP (2 devices)",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_log_tells(case: str) -> None:
    log, moves, told = CASES[case]
    assert transports(log, moves) == told


@given(st.text(alphabet=st.sampled_from("|[]:. \n0123cfgselfremotyadinu#*()/%"), max_size=400))
def test_a_log_may_hold_anything(log: str) -> None:
    transports(log, "read")


@pytest.mark.parametrize("part", ["[a:1:1] |", "[a:1:1]  | x |", "[:", "Discovered 1 "])
def test_a_log_of_one_endless_line_holds_nobody_up(part: str) -> None:
    """Engines' images are their users', and one operator looks after all."""
    began = time.process_time()
    log = part * ((1 << 20) // len(part)) + "\n" + table(PEER, READ, whole("tcp/eth0"))
    assert transports(log, "read") == ("TCP (tcp/eth0)",)
    assert time.process_time() - began < 5


def test_of_many_transports_the_status_takes_some() -> None:
    told = summary([tuple(f"TCP (tcp/eth{i})" for i in range(10_000))])
    assert told is not None
    assert len(told) == LONGEST_SUMMARY


def test_of_several_engines_it_is_told_how_many() -> None:
    assert summary([(), ()]) is None
    assert summary([("TCP (tcp/eth0)",), (), ("TCP (tcp/eth0)",)]) == "TCP (tcp/eth0)"
    told = summary([("TCP (tcp/eth0)",), ("shared memory (cma/memory)",), ("TCP (tcp/eth0)",)])
    assert told == "TCP (tcp/eth0) of 2 engines; shared memory (cma/memory) of 1 engine"
