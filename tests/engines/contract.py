"""What a client can see of an engine: how the answers of a real engine and of a simulated one are compared,
and the written list of what differs on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.bench.scrape import ENGINE_IN_HAND, read_sums

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"

Json = Any


# What differs on purpose


@dataclass(frozen=True)
class Difference:
    """Something that is not compared, and why. A pattern names what it covers: `fields` of JSON by dotted
    path, of which only the type is compared; `growth`, metrics whose growth is not compared; `events`, fields
    of KV events (see `kv_events.Hashes`); `errors`, cases by name, of whose errors only the status is
    compared."""

    what: str
    reason: str
    fields: tuple[str, ...] = ()
    growth: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    sometimes: bool = False
    """Whether it shows depends on what the engines did before."""

    def patterns(self) -> Iterator[tuple[str, str]]:
        """(kind, pattern) of each."""
        for kind in ("fields", "growth", "events", "errors"):
            for pattern in getattr(self, kind):
                yield kind, pattern


DIFFERENCES = [
    Difference(
        "The text and the tokens of an answer",
        "There is no model. An answer follows from its prompt, the same in every run, in real words of the "
        "model's vocabulary.",
        fields=(
            "choices.message.content",
            "choices.delta.content",
            "choices.text",
            "choices.token_ids",
            "choices.logprobs.content.token",
            "choices.logprobs.content.bytes",
            "choices.logprobs.content.top_logprobs.token",
            "choices.logprobs.content.top_logprobs.bytes",
            "choices.logprobs.tokens",
            "choices.logprobs.text_offset",
        ),
    ),
    Difference(
        "Log probabilities",
        "Their shape is vLLM's; the numbers are made up, falling from the chosen token on.",
        fields=(
            "choices.logprobs.content.logprob",
            "choices.logprobs.content.top_logprobs.logprob",
            "choices.logprobs.token_logprobs",
            "choices.logprobs.top_logprobs",
        ),
    ),
    Difference(
        "Ids and dates",
        "Each engine makes its own.",
        fields=(
            "id",
            "created",
            "system_fingerprint",
            "data.created",
            "data.permission.id",
            "data.permission.created",
            "kv_transfer_params.remote_engine_id",
            "kv_transfer_params.remote_request_id",
        ),
    ),
    Difference(
        "Where KV and its events are",
        "Each engine numbers its own blocks and has its own ports and paths.",
        fields=(
            "kv_transfer_params.remote_block_ids",
            "kv_transfer_params.remote_port",
            "0.endpoint",
            "0.replay_endpoint",
        ),
    ),
    Difference(
        "How long things take",
        "Time comes from a cost profile; how near it is to an engine's is a measurement of its own.",
        growth=("vllm:*_seconds_sum",),
    ),
    Difference(
        "NIXL descriptors",
        "NIXL reads blocks that lie together as one piece in each layer; which do depends on all that an "
        "engine did before.",
        growth=("vllm:nixl_num_descriptors_sum",),
        sometimes=True,
    ),
    Difference(
        "What is wrong within a message",
        "vLLM tells of each kind of message why it is none, in its libraries' words; the simulator tells the "
        "first fault.",
        errors=("within a message: *",),
    ),
    Difference(
        "Hashes of KV blocks",
        "vLLM's begin with a random number in each process. That the same block has the same hash, and which "
        "is whose parent, is compared.",
        events=("block_hashes", "parent_block_hash"),
    ),
]


# Comparison


@dataclass
class Seen:
    """What a client saw of one answer, without what differs on purpose."""

    status: int
    header_names: list[str]
    content_type: str | None
    body: Json
    """A JSON body's shape, or the list of a stream's events; equal neighbours are one."""


def seen(response: httpx.Response, covered: set[tuple[str, str]], case: str = "") -> Seen:
    """`covered`: takes the patterns that hid something."""
    kind = response.headers.get("content-type")
    body: Json = None
    if kind == "application/json" and response.content:
        body = shape(response.json(), covered=covered)
        for pattern in [p for d in DIFFERENCES for p in d.errors if fnmatchcase(case, p)]:
            covered.add(("errors", pattern))
            body = {"error": {**body["error"], "message": "", "type": "", "param": ""}}
    elif kind is not None and kind.startswith("text/event-stream"):
        body = _without_repeats([_event(event, covered) for event in response.text.split("\n\n")])
    elif not response.request.url.path.endswith("/metrics"):
        body = response.text
    return Seen(response.status_code, sorted(response.headers), kind, body)


def _event(text: str, covered: set[tuple[str, str]]) -> Json:
    if text.startswith("data: {"):
        return shape(json.loads(text.removeprefix("data: ")), covered=covered)
    return text


def shape(value: Json, path: str = "", *, covered: set[tuple[str, str]]) -> Json:
    """A JSON value as it is compared: itself, but for the fields that differ on purpose, of which the types
    are left. Lists do not count in the paths of `Difference.fields`; equal neighbours in a list are one, for
    a chunk of a stream may hold one token or several."""
    for difference in DIFFERENCES:
        for pattern in difference.fields:
            if fnmatchcase(path, pattern):
                covered.add(("fields", pattern))
                return types(value)
    if isinstance(value, dict):
        return {
            key: shape(inner, f"{path}.{key}".strip("."), covered=covered) for key, inner in value.items()
        }
    if isinstance(value, list):
        return _without_repeats([shape(inner, path, covered=covered) for inner in value])
    return value


def types(value: Json) -> Json:
    """`"text"`, 1, [0.5, 0.25] and {"any": None} are `str`, `int`, [`float`] and {`str`: None}."""
    if isinstance(value, dict):
        return {"str": _without_repeats([types(inner) for inner in value.values()])}
    if isinstance(value, list):
        return _without_repeats([types(inner) for inner in value])
    return None if value is None else type(value).__name__


def _without_repeats(values: list[Json]) -> list[Json]:
    return [value for i, value in enumerate(values) if i == 0 or value != values[i - 1]]


def unequal(real: Json, simulated: Json, path: str = "") -> dict[str, tuple[Json, Json]]:
    """Path → (real, simulated), where two values differ; "absent" where one has nothing."""
    if isinstance(real, dict) and isinstance(simulated, dict):
        told: dict[str, tuple[Json, Json]] = {}
        for key in sorted({*real, *simulated}):
            told |= unequal(real.get(key, "absent"), simulated.get(key, "absent"), f"{path}.{key}".strip("."))
        return told
    if isinstance(real, list) and isinstance(simulated, list) and len(real) == len(simulated):
        told = {}
        for i, pair in enumerate(zip(real, simulated, strict=True)):
            told |= unequal(*pair, f"{path}[{i}]")
        return told
    return {} if real == simulated else {path: (real, simulated)}


# Metrics


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""(name, labels) → value."""

_OWN_LABELS = ("model_name", "engine")


def samples(text: str) -> Samples:
    """vLLM's counters and histograms in a Prometheus exposition, less buckets and creation times."""
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in _OWN_LABELS))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram") and family.name.startswith("vllm:")
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def growth(before: Samples, after: Samples) -> dict[str, float]:
    """What was added to which metric, as `name{label=value}`."""
    grown: dict[str, float] = {}
    for (name, labels), value in after.items():
        if added := value - before.get((name, labels), 0.0):
            told = ",".join(f"{k}={v}" for k, v in labels)
            grown[f"{name}{{{told}}}" if told else name] = round(added, 6)
    return grown


def catalogue(text: str) -> dict[str, Json]:
    """Every metric by name: its type and the labels of its samples."""
    found: dict[str, Json] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        names_only = family.name.startswith("http_")  # the values say which pages were asked for
        labels = {
            (s.name, *(f"{k}={'' if names_only and k != 'le' else v}" for k, v in sorted(s.labels.items())))
            for s in family.samples
        }
        found[family.name] = {"type": family.type, "samples": sorted(labels)}
    return found


def unexpected(differing: dict[str, Json], covered: set[tuple[str, str]]) -> dict[str, Json]:
    """Those of the metrics with different growth that the list does not cover. `covered` takes the patterns
    that do."""
    left = {}
    for name, values in differing.items():
        patterns = [p for d in DIFFERENCES for p in d.growth if fnmatchcase(name.partition("{")[0], p)]
        covered |= {("growth", pattern) for pattern in patterns}
        if not patterns:
            left[name] = values
    return left


def busy(text: str) -> dict[str, float]:
    """The gauges that an engine without work has at 0, as far as they are not."""
    return {name: value for name, value in read_sums(text, ENGINE_IN_HAND).items() if value}


# The page


def table() -> str:
    """The list as Markdown."""
    rows = [f"| {d.what} | {d.reason} | {_names(d)} |\n" for d in DIFFERENCES]
    return "| What differs | Why | Where |\n| --- | --- | --- |\n" + "".join(rows)


def _names(difference: Difference) -> str:
    return ", ".join(f"`{pattern}`" for _, pattern in difference.patterns())


def faults_shown(page: str) -> list[str]:
    """The faults in the first column of the page's table of faults."""
    return re.findall(r"^\| `([^`|]+)` \|[^|]*\|$", page, re.MULTILINE)
