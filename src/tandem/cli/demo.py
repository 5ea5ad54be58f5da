"""`tandem demo`: the proof, on the built-in endpoint or on one that runs already."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from typing import TYPE_CHECKING

from tandem.cli import ENVIRONMENT, FAILURE, INTERRUPTED, OK, USAGE, complain
from tandem.cli.flags import port
from tandem.cli.up import add_endpoint_arguments, code_of, plan_or_complain, run_until_signalled

if TYPE_CHECKING:
    import httpx

    from tandem.bench.proof import Proof
    from tandem.local.plan import LocalPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    parser.add_argument(
        "--port", type=port, help="port of the router (default: the first free one from 8000)"
    )
    parser.add_argument("--url", help="router of an endpoint that runs already, instead of starting one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    import httpx

    from tandem.bench.proof import ProofError
    from tandem.bench.stream import RequestFailed
    from tandem.local.errors import LocalError

    if arguments.url:
        if arguments.file or arguments.model or arguments.port or arguments.connector:
            complain(
                "--url names an endpoint that runs already: -f, --model, --port and --connector do not go "
                "with it"
            )
            return USAGE
        if not arguments.url.startswith("http://"):
            complain(f"--url {arguments.url}: is not of the form http://HOST:PORT")
            return USAGE
    elif arguments.port is None:
        from tandem.local.ports import free_port

        try:
            arguments.port = free_port(8000, arguments.host)
        except LocalError as error:
            complain(error)
            return code_of(error)
    proofs: list[Proof] = []
    plan: LocalPlan | int | None = None if arguments.url else plan_or_complain(arguments)
    if isinstance(plan, int):
        return plan
    try:
        if plan is None:
            asyncio.run(_prove(arguments.url, proofs))
        else:
            run_until_signalled(_start_and_prove(plan, proofs))
    except LocalError as error:
        complain(error)
        return code_of(error)
    except (ProofError, RequestFailed) as error:
        complain(error)
        return FAILURE
    except httpx.InvalidURL as error:
        complain(f"--url {arguments.url}: {error}")
        return USAGE
    except httpx.HTTPError as error:
        complain(_unreachable(error, arguments.url))
        return ENVIRONMENT if arguments.url else FAILURE
    if not proofs:
        return INTERRUPTED
    _show(proofs[0], plan, arguments)
    return OK if proofs[0].held else FAILURE


def _unreachable(error: httpx.HTTPError, url: str | None) -> str:
    """What could not be reached: the router, or one of the engines behind it, whose counters are read."""
    import httpx

    why = str(error) or type(error).__name__
    try:
        asked = error.request.url
    except RuntimeError:  # it failed before there was a request
        asked = None
    if url and asked and (asked.host, asked.port) != ((router := httpx.URL(url)).host, router.port):
        engine = f"{asked.scheme}://{asked.netloc.decode()}"
        return (
            f"{engine}, an engine of {url}, cannot be reached: {why}. "
            "`tandem status` tells whether it is being started."
        )
    return f"{url or 'the endpoint'} cannot be reached: {why}. Start one with `tandem up`."


async def _prove(url: str, proofs: list[Proof]) -> None:
    from tandem.bench.proof import prove
    from tandem.cli.console import err

    proofs.append(await prove(url.rstrip("/"), on_step=lambda step: err.print(f"sending {step}")))


async def _start_and_prove(plan: LocalPlan, proofs: list[Proof]) -> None:
    from tandem.cli.console import Progress, err, show_notes
    from tandem.local.endpoint import running

    show_notes(plan)
    with Progress() as progress:
        async with running(plan, on_progress=progress) as endpoint:
            progress.stop()
            err.print(f"ready after {progress.seconds:.0f} s")
            await endpoint.while_alive(_prove(plan.url, proofs))


def _show(proof: Proof, plan: LocalPlan | None, arguments: argparse.Namespace) -> None:
    from tandem.cli.console import out, show_proof

    if arguments.json:
        print(json.dumps(proof.as_dict(), indent=2))
        return
    show_proof(proof)
    failed = [c.claim for c in proof.checks if not c.held]
    if failed:
        complain(f"{len(failed)} of {len(proof.checks)} proofs failed: {'; '.join(failed)}")
    elif plan is not None:
        words = [
            sys.argv[0] if sys.argv[0].endswith("tandem") else "tandem",
            "up",
            "--port",
            str(plan.router.port),
        ]
        words += ["-f", str(arguments.file)] if arguments.file else []
        words += ["--model", str(arguments.model)] if arguments.model else []
        words += ["--connector", arguments.connector] if arguments.connector else []
        out.print(
            f"\nKeep it running with\n  {shlex.join(words)}\nand, while it runs, talk to {plan.url}:",
            markup=False,
        )
        out.print(f"  {plan.curl()}", markup=False)
    else:
        out.print(f"\nThe endpoint is {proof.url}")
