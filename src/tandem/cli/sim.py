"""`tandem sim`: simulated vLLM engines as one process."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli import ENVIRONMENT, FAILURE, OK, USAGE, complain
from tandem.cli.flags import host

if TYPE_CHECKING:
    from tandem.sim import EngineSpec, VllmArgs

_EPILOG = """\
What follows `--` is a vLLM 0.32 command line: flags alone, or a whole command (`vllm serve MODEL …`,
`python -m vllm.entrypoints.openai.api_server …`). Unknown flags are errors; known ones that have no meaning
for a simulator do nothing. Where --model is a folder with a tokenizer, prompts are tokenized as vLLM would;
else words count as tokens. VLLM_NIXL_SIDE_CHANNEL_HOST, VLLM_NIXL_SIDE_CHANNEL_PORT and
VLLM_CPU_KVCACHE_SPACE count as they do for vLLM. Of several engines, each takes the next HTTP, side-channel
and KV-event port. Their URLs are printed on stdout as JSON once all of them listen.

  tandem sim --port 8100 --engines 4 --role prefill -- --model m --max-model-len 32768
  tandem sim -- vllm serve /models/llama --port 8100 --kv-events-config '{"enable_kv_cache_events":true}'

Faults, for one request by the header x-sim-fault, for an engine by --fault or POST /sim/faults (text in the
same grammar; GET shows them, DELETE ends them), several with `;` between:

  KIND[=VALUE][@CHUNK][,times=N][,rate=P][,leg=prefill|decode|alone]

Kinds: refuse, hang, delay=SECONDS, reset, crash, status=CODE, head=CODE, error, truncate, badjson,
no-kv-params, lost-kv, stale-kv, expired-lease, full-buffer, slow=FACTOR; with LMCache also lost-notification
and late-notification=SECONDS. `@CHUNK`: after so many chunks of a streamed answer. GET /sim/state shows what
an engine is at.
"""

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--host", type=host, help="address to listen on (default: vLLM's --host, else 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, help="of the first engine (default: vLLM's --port, else 8000)")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="how many, alike (default: 1)")
    parser.add_argument(
        "--role",
        choices=_ROLES,
        help="hand KV over by NIXL in this role (default: that of --kv-transfer-config, which it replaces)",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="cost profile, JSON (default: SmolLM2, one core)"
    )
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="engine seconds in a second (default: 1)"
    )
    parser.add_argument("--fault", default="", metavar="FAULTS", help="faults from the start; see below")
    parser.add_argument(
        "--answer-tokens",
        type=_span,
        default=(32, 71),
        metavar="FROM-TO",
        help="length of an answer that nothing cuts short (default: 32-71)",
    )
    parser.add_argument(
        "--serve-model-files",
        action="store_true",
        help="serve the files of the tokenizer's folder at /tandem/model/, as the proxy of a model pod does",
    )
    parser.add_argument("vllm", nargs=argparse.REMAINDER, metavar="-- VLLM FLAGS", help="vLLM's command line")


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise ValueError(text)
    return span


def run(arguments: argparse.Namespace) -> int:
    from tandem.prompt import LoadError
    from tandem.sim import FaultError, ProfileError, UsageError, parse
    from tandem.sim.cost import CostProfile, load

    words = arguments.vllm[1:] if arguments.vllm[:1] == ["--"] else arguments.vllm
    try:
        args = parse(words)
        if arguments.role is not None:
            args = _with_role(args, arguments.role)
        if arguments.engines < 1 or not arguments.time_scale > 0:
            raise UsageError("--engines and --time-scale must be greater than 0")
        profile = load(arguments.profile) if arguments.profile else CostProfile()
        return _serve(arguments, _specs(arguments, args), profile)
    except (UsageError, FaultError, ProfileError) as error:
        complain(error)
        return USAGE
    except (OSError, LoadError) as error:
        complain(error)
        return ENVIRONMENT


def _with_role(args: VllmArgs, role: str) -> VllmArgs:
    from tandem.sim.args import KvTransfer, UsageError

    transfer = args.kv_transfer or KvTransfer(connector="NixlConnector")
    if "LMCache" in transfer.connector:
        raise UsageError("--role is for NIXL: LMCache's role is the pd_role of its own configuration")
    return replace(args, kv_transfer=replace(transfer, role=_ROLES[role]))


def _specs(arguments: argparse.Namespace, args: VllmArgs) -> list[EngineSpec]:
    from tandem.sim import EngineSpec
    from tandem.sim.build import side_channel

    port = arguments.port if arguments.port is not None else args.port if args.port is not None else 8000
    host, side_port = side_channel(os.environ)
    return [
        EngineSpec(
            args,
            port=port and port + i,
            side_channel=(host, side_port and side_port + i),
            faults=arguments.fault,
            events_offset=i,
        )
        for i in range(arguments.engines)
    ]


def _serve(arguments: argparse.Namespace, specs: list[EngineSpec], profile: object) -> int:
    import logging

    from tandem.sim import CostProfile, Fleet

    assert isinstance(profile, CostProfile)
    logging.basicConfig(stream=sys.stderr, level="INFO", format="%(levelname)s %(asctime)s [sim] %(message)s")

    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        fleet = Fleet(
            specs,
            host=arguments.host or specs[0].args.host or "127.0.0.1",
            profile=profile,
            time_scale=arguments.time_scale,
            answer_tokens=arguments.answer_tokens,
            serves_model_files=arguments.serve_model_files,
        )

        def crashed() -> None:
            if all(engine.engine.dead for engine in fleet.engines):
                stop.set()

        fleet.on_crash = crashed
        async with fleet:
            for url in fleet.urls:
                logging.getLogger("tandem.sim").info("Starting vLLM server on %s", url)
            logging.getLogger("tandem.sim").info("Application startup complete.")
            print(json.dumps({"urls": fleet.urls}), flush=True)
            await stop.wait()
            return FAILURE if all(engine.engine.dead for engine in fleet.engines) else OK

    try:
        import uvloop
    except ImportError:  # not on this platform; slower, otherwise the same
        return asyncio.run(main())
    return int(uvloop.run(main()))
