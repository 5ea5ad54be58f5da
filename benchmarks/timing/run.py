"""How true the simulator's time is: the same loads on a real pair and on a simulated one, compared.

    python benchmarks/timing/run.py        (or `make bench-timing`)

Starts `tandem up`, calibrates on its engines, puts each load on it three times, does the same in virtual time
with simulated engines that have the same command lines and the profile just measured, and writes the table
into docs/simulator.md and everything into benchmarks/timing/results.json. About twelve minutes on two cores;
while other processes use them it waits, and what they disturbed is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import loads
import report
from quiet import undisturbed

from tandem.bench.calibrate import calibrate
from tandem.bench.load import LoadError, ask
from tandem.config import RouterConfig
from tandem.http import Client, Origin
from tandem.router.app import running
from tandem.sim import CostProfile, EngineSpec, Fleet, parse, virtual

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "simulator.md"
RESULTS = HERE / "results.json"
START_SECONDS = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def plan_of(command: list[str]) -> dict[str, Any]:
    shown = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, check=True)
    plan: dict[str, Any] = json.loads(shown.stdout)
    return plan


def up_command() -> list[str]:
    return [sys.executable, "-m", "tandem", "up", "--port", str(free_port())]


@contextmanager
def real_pair() -> Iterator[dict[str, Any]]:
    """`tandem up` with the built-in endpoint; gives its plan once it is ready."""
    command = up_command()
    with tempfile.TemporaryDirectory() as state:
        plan = plan_of(command)
        environment = {**os.environ, "XDG_STATE_HOME": state}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(ready(plan["url"], process))
            yield plan
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def ready(url: str, process: subprocess.Popen[bytes]) -> None:
    client = Client()
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"tandem up ended with {process.returncode}")
            try:
                await ask(client, Origin.parse(url), "/ready")
            except LoadError:
                await asyncio.sleep(0.5)
            else:
                return
        raise SystemExit("tandem up was not ready in time")
    finally:
        await client.aclose()


def engines(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The plan's prefiller and decoder, by role."""
    return {engine["role"]: engine for engine in plan["engines"]}


async def on_real(plan: dict[str, Any], runs: int, attempts: int) -> tuple[list[report.Figures], float]:
    """Every load, several times over: figures of each run, and the most that others used of the CPU."""
    pair = engines(plan)
    client = Client()
    origins = [Origin.parse(url) for url in (plan["url"], pair["prefill"]["url"], pair["decode"]["url"])]
    target = loads.Target(client, "smollm2", *origins)
    result, most = [], 0.0
    try:
        for number in range(runs):
            found: report.Figures = {}
            for load in loads.LOADS:
                say(f"run {number + 1} of {runs}, load {load.name}")
                one = functools.partial(loads.run, target, load, f"{load.name} {number}")
                timings, others = await undisturbed(one, attempts=attempts, say=say)
                found |= report.figures(load.name, timings)
                most = max(most, others)
            result.append(found)
        return result, most
    finally:
        await client.aclose()


async def on_simulated(plan: dict[str, Any], profile: CostProfile, runs: int) -> list[report.Figures]:
    """The same command lines, the same router configuration; in virtual time."""
    pair = engines(plan)
    specs = [EngineSpec(parse(pair[role]["argv"])) for role in ("prefill", "decode")]
    client = Client()
    async with Fleet(specs, profile=profile, environment={}) as fleet:
        config = RouterConfig(
            port=0,
            prefill=(fleet.urls[0],),
            decode=(fleet.urls[1],),
            routing_threshold=1024,
            log_level="error",
        )
        # Prompts are ids, which need no tokenizer; its process would live in real time.
        async with running(config, None) as (server, app):
            while app.fleet.unproved:  # noqa: ASYNC110 - the canaries go by HTTP
                await asyncio.sleep(0.1)
            origins = [Origin.parse(u) for u in (f"http://127.0.0.1:{server.port}", *fleet.urls)]
            target = loads.Target(client, "smollm2", *origins)
            try:
                result = []
                for number in range(runs):
                    found: report.Figures = {}
                    for load in loads.LOADS:
                        timings = await loads.run(target, load, f"{load.name} {number}")
                        found |= report.figures(load.name, timings)
                    result.append(found)
                return result
            finally:
                await client.aclose()


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()})"


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  load {os.getloadavg()[0]:.1f}  {what}", file=sys.stderr, flush=True)


def measure(runs: int, attempts: int) -> dict[str, Any]:
    """Calibrate on a real pair and put the loads on it."""
    with real_pair() as plan:
        pair = engines(plan)
        urls = {role: pair[role]["url"] for role in ("prefill", "decode")}
        calibrating = functools.partial(calibrate, **urls, on_step=say)
        found, disturbed = asyncio.run(undisturbed(calibrating, attempts=attempts, say=say))
        calibration = found.as_dict()
        for sample in calibration["samples"]:
            sample["engine"] = next(role for role, url in urls.items() if url == sample["engine"])
        real, others = asyncio.run(on_real(plan, runs, attempts))
        return {
            "machine": machine(),
            "others": max(disturbed, others),
            "calibration": calibration,
            "real": real,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each load (default: 3)")
    parser.add_argument(
        "--attempts",
        type=int,
        default=3,
        help="at a measurement that other processes do not disturb (default: 3; 1: take it as it comes)",
    )
    parser.add_argument(
        "--again", action="store_true", help="only simulate, against the real times that are on file"
    )
    arguments = parser.parse_args()
    results = (
        json.loads(RESULTS.read_bytes()) if arguments.again else measure(arguments.runs, arguments.attempts)
    )
    say("simulated pair")
    profile = CostProfile(**results["calibration"]["profile"])
    plan = plan_of(up_command())
    results["simulated"] = virtual.run(on_simulated(plan, profile, len(results["real"])))
    write(results)


def write(results: dict[str, Any]) -> None:
    """Compare, and write the file and the page."""
    results["rows"] = report.compare(results["real"], results["simulated"])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    medians = [abs(r["error"]) for r in results["rows"] if r["quantile"] == "p50"]
    about = (
        f"SmolLM2-135M (bfloat16), vLLM 0.32, {results['machine']}, one core for each engine; medians of "
        f"{len(results['real'])} runs. The profile explains its own calibration within "
        f"{results['calibration']['error']:.0%} (root mean square); of the medians below the worst is off by "
        f"{max(medians):.0%}. Other processes used {results['others']:.0%} of the CPU at most."
    )
    text = report.table(results["rows"], {load.name: load.what for load in loads.LOADS}, about)
    report.insert(PAGE, text)
    print(text)


if __name__ == "__main__":
    main()
