"""`tandem up`: an endpoint on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli import ENVIRONMENT, FAILURE, OK, USAGE, complain

if TYPE_CHECKING:
    from tandem.local.errors import LocalError
    from tandem.local.plan import LocalPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    parser.add_argument("--port", type=port, default=8000, help="port of the router (default 8000)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and stop")
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which endpoint to run and where; shared with `tandem demo`."""
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        help="manifest of an InferenceEndpointConfig (default: the built-in endpoint)",
    )
    parser.add_argument(
        "--model", type=Path, help="folder of the model, instead of the one the manifest names"
    )
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", help="address of the router (default 127.0.0.1)"
    )
    parser.add_argument(
        "--vllm-python",
        default=_vllm_python(),
        metavar="PYTHON",
        help="interpreter that has vLLM, when it is not this one: a GPU build, say (default: %(default)s)",
    )
    parser.add_argument(
        "--no-memory-check",
        action="store_true",
        help="start also where the engines take more memory than is available",
    )


def host(text: str) -> str:
    from tandem.config.engines import listening_host

    try:
        return listening_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _vllm_python() -> str:
    """The interpreter that `make setup VLLM_PYTHON=…` was told of, else this one."""
    told = Path(sys.prefix) / "vllm-python"
    return told.read_text("utf-8").strip() if told.is_file() else sys.executable


def run(arguments: argparse.Namespace) -> int:
    from tandem.local.errors import LocalError

    if arguments.json and not arguments.dry_run:
        complain("--json goes with --dry-run")
        return USAGE
    plan = plan_or_complain(arguments, dry=arguments.dry_run)
    if isinstance(plan, int):
        return plan
    if arguments.dry_run:
        from tandem.cli.console import show_plan

        print(json.dumps(plan.as_dict(), indent=2)) if arguments.json else show_plan(plan)
        return OK
    try:
        run_until_signalled(_up(plan))
    except LocalError as error:
        complain(error)
        return code_of(error)
    return OK


def code_of(error: LocalError) -> int:
    """The exit code that tells whose turn it is."""
    from tandem.local.errors import ProcessDied, ResourceError, SeveralErrors

    match error:
        case ResourceError():
            return USAGE
        case SeveralErrors():
            return USAGE if USAGE in map(code_of, error.errors) else ENVIRONMENT
        case ProcessDied():
            return FAILURE
        case _:
            return ENVIRONMENT


def plan_or_complain(arguments: argparse.Namespace, *, dry: bool = False) -> LocalPlan | int:
    """The plan that the flags ask for, or the exit code after saying why there is none."""
    from tandem.api import InvalidResource
    from tandem.cli.console import err
    from tandem.engine import MachineError, detect
    from tandem.local.errors import LocalError
    from tandem.local.manifest import read_manifest
    from tandem.local.plan import make_plan

    try:
        manifest = read_manifest(arguments.file, another_model=arguments.model is not None)
        return make_plan(
            manifest.endpoint,
            manifest.raw,
            detect(python=arguments.vllm_python),
            sys.executable,
            model=arguments.model,
            host=arguments.host,
            port=arguments.port,
            dry=dry,
            check_memory=not arguments.no_memory_check,
            warnings=manifest.warnings,
            on_convert=lambda: err.print("converting the built-in model, once; it takes half a minute"),
        )
    except InvalidResource as error:
        complain(f"{error.source} is not a valid InferenceEndpointConfig:")
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return USAGE
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}" if error.filename else error)
        return ENVIRONMENT
    except LocalError as error:
        complain(error)
        return code_of(error)
    except MachineError as error:
        complain(error)
        return ENVIRONMENT
    except ValueError as error:
        complain(error)
        return USAGE


async def _up(plan: LocalPlan) -> None:
    from tandem.cli.console import Progress, err, out, show_notes
    from tandem.local.endpoint import running

    show_notes(plan)
    with Progress() as progress:
        async with running(plan, on_progress=progress) as endpoint:
            progress.stop()
            err.print(f"ready after {progress.seconds:.0f} s; logs in {plan.logs}; stop with Ctrl-C")
            out.print(f"{plan.url}\n{plan.curl()}", markup=False)
            await endpoint.died()


def run_until_signalled(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; SIGINT or SIGTERM cancels it, and what it then cleans up is waited for.

    Errors of the work are raised; being signalled is a normal end.
    """

    async def main() -> None:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
