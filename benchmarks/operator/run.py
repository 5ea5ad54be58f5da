"""What an operator takes with one endpoint and with many, side by side.

    python benchmarks/operator/run.py        (or `make bench-operator`)

Starts an API server with Kubernetes' own controllers and scheduler (KUBEBUILDER_ASSETS), a node of kwok's
that makes pods ready, and `tandem operator`; writes the table into docs/operator-faults.md and everything
into benchmarks/operator/results.json. About ten minutes on two cores. The control plane shares the machine
with the operator, and with whatever else runs there: how much that took is in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(HERE.parent / "common")]

from quiet import Meter
from tests.api.conftest import _assets
from tests.operator.process.plane import Cluster, Plane, cluster, plane
from tests.operator.process.scale import at_rest, latencies, restarted, settle

PAGE = REPOSITORY / "docs/operator-faults.md"
MARKS = ("<!-- scale: begin; written by `make bench-operator` -->\n", "<!-- scale: end -->")
SETTLE_SECONDS = 1200


async def measure(kube: Cluster, namespace: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """With so many endpoints, in a namespace that had none."""
    names = [f"e{number}" for number in range(count)]
    meter = Meter()
    await kube.namespace(namespace)
    with kube.plane.operator() as operator:
        settled = await settle(kube, namespace, names, SETTLE_SECONDS)
        say(f"{count}: settled after {settled:.1f} s")
        writes = operator.requests()
        rest = await at_rest(operator, seconds=arguments.rest)
        say(f"{count}: at rest {rest}")
        took = sorted(await latencies(kube, namespace, names, arguments.changes))
        say(f"{count}: latency {statistics.median(took):.3f} s, {percentile(took, 99):.3f} s")
        await at_rest(operator, seconds=1)
        operator.process.terminate()
        operator.process.wait()
    began = time.monotonic()
    with kube.plane.operator() as operator:
        restart = await restarted(operator, began, count)
        say(f"{count}: {restart}")
        operator.process.terminate()
        operator.process.wait()
    return {
        "endpoints": count,
        "settled_s": settled,
        "requests_until_settled": sum(writes.values()),
        "latency_p50_s": statistics.median(took),
        "latency_p99_s": percentile(took, 99),
        "rest_requests_per_minute": rest.requests,
        "rest_cpu_cores": rest.cpu,
        "memory_bytes": rest.memory,
        "restart_s": restart.seconds,
        "restart_writes": restart.writes,
        "others_share_of_cpu": meter.others(),
    }


def percentile(ordered: list[float], percent: float) -> float:
    """The nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def table(one: dict[str, Any], many: dict[str, Any]) -> str:
    def row(what: str, name: str, form: str, scale: float = 1.0) -> str:
        a, b = one[name] * scale, many[name] * scale
        return f"| {what} | {a:{form}} | {b:{form}} | {f'{b / a:.1f}' if a else '–'} |"

    lines = [
        f"| | 1 endpoint | {many['endpoints']} endpoints | ratio |",
        "| --- | --- | --- | --- |",
        row("from a change of one endpoint to its Deployment, p50, ms", "latency_p50_s", ".0f", 1000),
        row("the same, p99, ms", "latency_p99_s", ".0f", 1000),
        row("from applying all until all are complete, s", "settled_s", ".1f"),
        row("requests until then", "requests_until_settled", ".0f"),
        row("restart: from its start until it has looked at all, s", "restart_s", ".1f"),
        row("restart: writes", "restart_writes", ".0f"),
        row("memory at rest, MB", "memory_bytes", ".0f", 1e-6),
        row("CPU at rest, % of a core", "rest_cpu_cores", ".1f", 100),
    ]
    for verb in sorted({*one["rest_requests_per_minute"], *many["rest_requests_per_minute"]}):
        a, b = (found["rest_requests_per_minute"].get(verb, 0) for found in (one, many))
        if a or b:
            lines.append(
                f"| requests at rest, a minute: {verb} | {a:.0f} | {b:.0f} | {f'{b / a:.1f}' if a else '–'} |"
            )
    others = max(one["others_share_of_cpu"], many["others_share_of_cpu"])
    return "\n".join(lines) + (
        f"\n\n{os.cpu_count()} cores, shared with the control plane; other processes took up to {others:.0%} "
        "of them.\n"
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def main(arguments: argparse.Namespace) -> None:
    found = []
    for count in (1, arguments.endpoints):
        # A plane for each: what the first one left in it is none of the second one's business.
        with tempfile.TemporaryDirectory() as folder, plane(_assets(), Path(folder), nodes=True) as made:
            found.append(await _in(made, count, arguments))
    one, many = found
    text = table(one, many)
    results = {"machine": {"cores": os.cpu_count(), "python": platform.python_version()}, "runs": found}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    page = PAGE.read_text("utf-8")
    start, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
    PAGE.write_text(page[:start] + text + page[end:], "utf-8")
    print(text)


async def _in(made: Plane, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    async with cluster(made) as kube:
        return await measure(kube, "scale", count, arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoints", type=int, default=200)
    parser.add_argument("--changes", type=int, default=200, help="of which the latency is measured")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds that it is watched at rest")
    asyncio.run(main(parser.parse_args()))
