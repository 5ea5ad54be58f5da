"""`tandem calibrate`: measures a real engine and writes a cost profile for simulated ones."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli import ENVIRONMENT, FAILURE, OK, USAGE, complain
from tandem.cli.flags import positive

if TYPE_CHECKING:
    from tandem.bench.calibrate import Calibration

_EPILOG = """\
Takes one engine, or a pair: prompts are then timed on the prefiller, streams on the decoder, and KV transfers
between them. With --engine and a pair, the pair tells the KV transfers only. Nothing else may use the engines
meanwhile. A few minutes on a CPU; prompts are new ones each time, so prefix caches do no harm.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--engine", metavar="URL", help="a vLLM engine, http://HOST:PORT")
    parser.add_argument("--prefill", metavar="URL", help="prefiller of a pair")
    parser.add_argument("--decode", metavar="URL", help="decoder of the pair")
    parser.add_argument("--model", metavar="NAME", help="served model name (default: the engine's first)")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="the engine's, or the decoder's (default: the power of two that explains the times best)",
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="of each measurement (default: 3)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the profile, for `tandem sim`"
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    from tandem.bench.calibrate import calibrate
    from tandem.bench.calibrate_engine import CalibrationError
    from tandem.bench.load import LoadError, Unreachable
    from tandem.cli.console import err

    a = arguments
    if (a.prefill is None) != (a.decode is None):
        complain("--prefill and --decode go together")
        return USAGE
    if a.engine is None and a.prefill is None:
        complain("name an engine by --engine, or a pair by --prefill and --decode")
        return USAGE
    if not a.output.absolute().parent.is_dir():
        complain(f"--output {a.output}: there is no folder {a.output.absolute().parent}")
        return USAGE
    for flag in ("engine", "prefill", "decode"):
        if (url := getattr(a, flag)) is not None and (problem := _problem(url)):
            complain(f"--{flag}: {problem}")
            return USAGE
    try:
        with err.status("") as status:
            live = err.is_terminal

            def on_step(step: str) -> None:
                status.update(step) if live else err.print(step, markup=False)

            found = asyncio.run(
                calibrate(
                    a.engine,
                    prefill=a.prefill,
                    decode=a.decode,
                    model=a.model,
                    budget=a.max_num_batched_tokens,
                    repeats=a.repeats,
                    on_step=on_step,
                )
            )
        a.output.write_bytes(found.profile.to_json())
    except Unreachable as error:
        complain(f"{error}. Is the engine running? `tandem up` starts a pair.")
        return ENVIRONMENT
    except (CalibrationError, LoadError) as error:
        complain(error)
        return FAILURE
    except OSError as error:
        complain(f"{a.output}: {error.strerror}")
        return ENVIRONMENT
    _show(found, a)
    return OK


def _problem(url: str) -> str:
    from tandem.http import Origin

    try:
        Origin.parse(url)
    except ValueError as error:
        return str(error)
    return ""


def _show(found: Calibration, arguments: argparse.Namespace) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from tandem.cli.console import err, out

    for note in found.notes:
        err.print(f"note: {note}", markup=False)
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    table = Table(title="Measured, and the profile in its place", title_justify="left", box=SIMPLE)
    for column in ("what", "prompt", "streams", "context", "measured", "profile", "error"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for m in found.measured:
        s = m.sample
        table.add_row(
            s.kind.value,
            f"{s.tokens:,}" if s.tokens else "",
            str(s.streams or ""),
            f"{s.context:,.0f}" if s.streams else "",
            f"{s.seconds * 1000:,.1f} ms",
            f"{m.predicted * 1000:,.1f} ms",
            f"{m.error:+.1%}",
        )
    out.print(table)
    for size, seconds in found.transfers:
        out.print(f"KV transfer of {size / 1e6:.1f} MB: {seconds * 1000:.1f} ms")
    out.print(f"\nThe profile is off by {found.error:.1%} (root mean square). Use it with")
    out.print(f"  tandem sim --profile {arguments.output} …", markup=False)
