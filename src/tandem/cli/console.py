"""What commands show a person: progress and plans on stderr, results on stdout."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from tandem.bench.proof import Proof, Shot
    from tandem.cli.status import Seen
    from tandem.local.plan import LocalPlan
    from tandem.local.record import Found


class _Remarks(Console):
    """Where stderr cannot be written nothing is said, and what is being done goes on."""

    def print(self, *objects: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Rich would end the program."""


# Tables in a file or a pipe are not squeezed into 80 columns.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 110)
err = _Remarks(stderr=True, highlight=False, soft_wrap=True)


class Progress:
    """Shows what each process is doing: live on a terminal, one line a change elsewhere. Where the terminal
    goes meanwhile nothing is shown."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown: dict[str, str] = {}
        self._live = Live(console=err, refresh_per_second=4, transient=True) if err.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def stop(self) -> None:
        """Leave the terminal to whoever prints next."""
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def __call__(self, doing: dict[str, str]) -> None:
        seconds = self.seconds
        if self._live:
            table = Table.grid(padding=(0, 2))
            for name, what in doing.items():
                table.add_row(name, escape(what))
            table.add_row("", f"{seconds:.0f} s")
            self._live.update(table)
        else:
            for name, what in doing.items():
                if self._shown.get(name) != what:
                    err.print(f"{seconds:5.1f} s  {name}: {what}", markup=False)
        self._shown = dict(doing)


def show_notes(plan: LocalPlan) -> None:
    """What was decided for this machine, and which fields of the manifest do nothing on it."""
    for note in plan.notes:
        err.print(f"note: {note}", markup=False)
    if plan.unused_fields:
        err.print(f"ignored on one machine: {', '.join(plan.unused_fields)}", markup=False)


def show_plan(plan: LocalPlan) -> None:
    """Every process as a command line that could be typed."""
    show_notes(plan)
    for engine in plan.engines:
        where = f"cores {','.join(map(str, engine.cpus))}" if engine.cpus else ""
        where = f"GPUs {','.join(engine.gpus)}" if engine.gpus else where or "any core"
        out.print(f"# {engine.name}: {engine.url}, {where}", markup=False)
        env = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(engine.env.items()))
        out.print(f"{env} {shlex.join(engine.argv)}\n", markup=False)
    for attached in plan.attached:
        out.print(f"# {attached.role.value}, runs already: {attached.spec.url}\n", markup=False)
    out.print(f"# router: {plan.url}", markup=False)
    out.print(shlex.join(plan.router_argv), markup=False)


def show_proof(proof: Proof) -> None:
    """The two requests side by side, then every claim and what was seen."""
    table = Table(title="What happened to each request", title_justify="left", box=SIMPLE)
    table.add_column("")
    for shot in proof.shots:
        table.add_column(f"{shot.name} prompt", justify="right")
    for label, show in _FIGURES:
        cells = [show(shot) for shot in proof.shots]
        if any(cells):
            table.add_row(label, *cells)
    out.print(table)
    for shot in proof.shots:
        out.print(f"{shot.name} answer: {' '.join(shot.answer.split())}", markup=False)
    out.print()
    checks = Table(title="Proofs", title_justify="left", box=SIMPLE)
    for column in ("", "claim", "seen"):
        checks.add_column(column)
    for check in proof.checks:
        checks.add_row("[green]ok[/]" if check.held else "[red]FAILED[/]", check.claim, escape(check.seen))
    out.print(checks)


def show_endpoint(endpoint: Found, processes: Sequence[Seen]) -> None:
    """An endpoint of this machine and a line for each of its processes; of one that has ended, why it did."""
    known = endpoint.state
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(known.since))
    if not endpoint.running:
        why = " ".join(endpoint.cause_of_end.split())
        when = since if known.state == "ended" else f"after {since}"
        out.print(f"{endpoint.title}: ended {when}: {why}", markup=False)
        return
    out.print(
        f"{known.name} at {known.url}: {endpoint.phase} since {since}, as process {known.pid}\n"
        f"logs in {endpoint.folder}",
        markup=False,
    )
    table = Table(box=SIMPLE)
    for column in ("process", "role", "state"):
        table.add_column(column)
    for column in ("pid", "port", "restarts", "memory", "requests", "KV use"):
        table.add_column(column, justify="right")
    for seen in processes:
        p = seen.known
        memory = None if seen.memory_bytes is None else f"{seen.memory_bytes / 2**20:,.0f} MiB"
        kv_use = None if seen.kv_use is None else f"{seen.kv_use:.0%}"
        figures = (p.pid, p.port, p.restarts, memory, seen.requests, kv_use)
        shown = ("–" if figure is None else str(figure) for figure in figures)
        table.add_row(p.name, p.role, escape(seen.shown), *shown)
    out.print(table)
    for seen in processes:
        if seen.waits_for:
            out.print(f"{seen.known.name} waits: {seen.waits_for}", markup=False)
        if seen.known.cause:
            out.print(f"last death: {seen.known.cause}", markup=False)
        if seen.cache_bytes and any(seen.cache_bytes.values()):
            mb = {name: f"{size / 1e6:,.1f} MB" for name, size in seen.cache_bytes.items()}
            out.print(
                f"{seen.known.name}: KV from L1 {mb['l1_read']}, from L2 {mb['l2_read']}; written to L2 "
                f"{mb['l2_written']}",
                markup=False,
            )


def ms(value: float | None) -> str:
    """Milliseconds as a person reads them; nothing for None."""
    return "" if value is None else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


_FIGURES: tuple[tuple[str, Callable[[Shot], str]], ...] = (
    ("path", lambda s: s.path.replace("_", " ")),
    ("prompt tokens, counted by the router", lambda s: _count(s.router_tokens)),
    ("prompt tokens, counted by the engine", lambda s: _count(s.engine_tokens)),
    ("prefill leg", lambda s: ms(s.prefill_ms)),
    ("KV transfer", lambda s: "" if s.kv_bytes is None else f"{s.kv_bytes / 1e6:.1f} MB in {ms(s.kv_ms)}"),
    ("decoder: tokens received from the prefiller", lambda s: _count(s.remote_tokens)),
    ("decoder: tokens found in its own cache", lambda s: _count(s.cached_tokens)),
    ("decoder: prompt tokens computed", lambda s: _count(s.computed_tokens)),
    ("TTFT", lambda s: ms(s.ttft_ms)),
    ("ITL, median", lambda s: ms(s.itl_p50_ms)),
    ("ITL, longest", lambda s: ms(s.itl_max_ms)),
)
