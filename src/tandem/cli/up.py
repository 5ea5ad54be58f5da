"""`tandem up`: an endpoint on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.cli import ENVIRONMENT, FAILURE, OK, USAGE, complain
from tandem.cli.flags import engine, host, port, seconds

if TYPE_CHECKING:
    from tandem.api import Endpoint
    from tandem.local.errors import LocalError
    from tandem.local.manifest import Manifest
    from tandem.local.plan import LocalPlan

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    parser.add_argument("--port", type=port, default=8000, help="port of the router (default 8000)")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-url",
            type=engine,
            nargs="+",
            action="extend",
            default=[],
            metavar="URL",
            help=f"{role} engines that run already, with a NIXL connector, instead of starting any",
        )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and stop")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="return when the endpoint is ready, which then runs on by itself",
    )
    parser.add_argument(
        "--hung-after",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="restart a process that has neither answered nor worked for so long; 0: never "
        "(default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


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
        "--connector",
        choices=("auto", "nixl", "lmcache"),
        help="how KV is handed over, in place of the manifest's annotation; auto goes by its image and flags",
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


def _vllm_python() -> str:
    """The interpreter that `make setup VLLM_PYTHON=…` was told of, else this one."""
    told = Path(sys.prefix) / "vllm-python"
    return told.read_text("utf-8").strip() if told.is_file() else sys.executable


def run(arguments: argparse.Namespace) -> int:
    from tandem.local.errors import LocalError

    if bool(arguments.prefill_url) != bool(arguments.decode_url):
        complain("--prefill-url and --decode-url go together: one alone hands over to nobody")
        return USAGE
    if arguments.detach and not arguments.dry_run:
        from tandem.cli.detached import start

        folder = _or_complain(arguments, lambda: _folder(arguments))
        return folder if isinstance(folder, int) else start(arguments.words, folder, as_json=arguments.json)
    plan = plan_or_complain(arguments, dry=arguments.dry_run)
    if isinstance(plan, int):
        return plan
    if arguments.dry_run:
        from tandem.cli.console import show_plan

        print(json.dumps(plan.as_dict(), indent=2)) if arguments.json else show_plan(plan)
        return OK
    try:
        run_until_signalled(_up(plan, arguments.hung_after, as_json=arguments.json))
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
    return _or_complain(arguments, lambda: _plan(arguments, dry))


def _plan(arguments: argparse.Namespace, dry: bool) -> LocalPlan:
    from tandem.cli.console import err
    from tandem.engine import detect
    from tandem.local.attach import attach_plan
    from tandem.local.plan import make_plan

    manifest = _manifest(arguments)
    if not dry:
        _refuse_second(manifest.endpoint, arguments.port)
    if _attaches(arguments):
        return attach_plan(
            manifest.endpoint,
            manifest.raw,
            arguments.prefill_url,
            arguments.decode_url,
            sys.executable,
            given=arguments.file is not None,
            model=arguments.model,
            host=arguments.host,
            port=arguments.port,
            dry=dry,
            warnings=manifest.warnings,
        )
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


def _folder(arguments: argparse.Namespace) -> Path:
    """Where the logs of the endpoint that the flags ask for are, and of no other that runs."""
    return _refuse_second(_manifest(arguments).endpoint, arguments.port)


def _attaches(arguments: argparse.Namespace) -> bool:
    """Whether the flags name engines that run already; `tandem demo` has no such flags."""
    return bool(getattr(arguments, "decode_url", None))


def _manifest(arguments: argparse.Namespace) -> Manifest:
    """The manifest that the flags name; without one the built-in one, under another name where it has other
    engines."""
    from tandem.local.attach import renamed
    from tandem.local.manifest import read_manifest

    manifest = read_manifest(
        arguments.file, another_model=arguments.model is not None, connector=arguments.connector
    )
    if _attaches(arguments) and arguments.file is None:
        return replace(manifest, endpoint=renamed(manifest.endpoint))
    return manifest


def _refuse_second(endpoint: Endpoint, port: int) -> Path:
    from tandem.local import paths
    from tandem.local.record import refuse_second

    folder = paths.state(endpoint.metadata.name) / str(port)
    refuse_second(folder)
    return folder


def _or_complain(arguments: argparse.Namespace, work: Callable[[], T]) -> T | int:
    """What the work comes to, or the exit code after saying what is wrong with the flags or this machine."""
    from tandem.api import InvalidResource
    from tandem.engine import MachineError
    from tandem.local.errors import LocalError

    try:
        return work()
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


async def _up(plan: LocalPlan, hung_after: float, *, as_json: bool) -> None:
    from tandem.cli.console import Progress, err, show_notes
    from tandem.local.endpoint import running

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # whoever reads it may be gone, and the endpoint goes on
            print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)

    show_notes(plan)
    with Progress() as progress:
        async with running(plan, on_progress=progress) as endpoint:
            progress.stop()
            stop = "Ctrl-C" if err.is_terminal else f"`tandem down {plan.name} --port {plan.router.port}`"
            err.print(
                f"ready after {progress.seconds:.0f} s; logs in {plan.logs}; stop with {stop}", markup=False
            )
            ready = {"name": plan.name, "url": plan.url, "pid": os.getpid(), "logs": str(plan.logs)}
            with contextlib.suppress(OSError):  # whoever waits for it may be gone
                print(
                    json.dumps({**ready, "curl": plan.curl()}) if as_json else f"{plan.url}\n{plan.curl()}",
                    flush=True,
                )
            await endpoint.keep_up(tell, hung_after=hung_after)


def run_until_signalled(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; SIGINT, SIGTERM or SIGHUP cancels it, and what it then cleans up is waited for.

    SIGHUP does not if this process was told to ignore it, as under nohup. Errors of the work are raised;
    being signalled is a normal end.
    """

    async def main() -> None:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
