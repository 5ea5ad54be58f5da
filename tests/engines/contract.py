"""What a client can see of an engine: the cases sent to a real engine and to a simulated one, how two answers
are compared, and the written list of what differs on purpose.

Run as a script it writes that list into docs/simulator.md.
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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"

Json = Any


# The cases


@dataclass(frozen=True)
class Case:
    """One request. `body` is sent as JSON; `raw` as it is."""

    name: str
    method: str
    path: str
    body: Json = None
    raw: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name


MODEL = "smollm2"
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
FRANCE = "What is the capital of France?"
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(text: str = FRANCE, **more: Json) -> Json:
    """Its answer is always of `max_tokens` tokens, whatever the model makes of the text."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, **_SHORT, **more}


def completion(prompt: Json = "The capital of France is", **more: Json) -> Json:
    return {"model": MODEL, "prompt": prompt, **_SHORT, **more}


_SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
_TEXT = (("content-type", "text/plain"),)

CASES = [
    Case("health", "GET", "/health"),
    Case("ping", "GET", "/ping"),
    Case("version", "GET", "/version"),
    Case("models", "GET", "/v1/models"),
    Case("metrics", "GET", "/metrics"),
    Case("load", "GET", "/load"),
    Case("event sources", "GET", "/kv_event_sources"),
    Case("no such path", "GET", "/nope"),
    Case("no such path, POST", "POST", "/nope", {}),
    Case("wrong method", "GET", CHAT),
    Case("tokenize a text", "POST", "/tokenize", {"model": MODEL, "prompt": "Hello there"}),
    Case("tokenize a chat", "POST", "/tokenize", {**chat(), "return_token_strs": True}),
    Case("tokenize, wrong model", "POST", "/tokenize", {"model": "nope", "prompt": "Hello"}),
    Case("tokenize nothing", "POST", "/tokenize", {}),
    Case("detokenize", "POST", "/detokenize", {"model": MODEL, "tokens": [19556, 665]}),
    Case("chat", "POST", CHAT, chat()),
    Case("chat, own request id", "POST", CHAT, chat(), headers=(("x-request-id", "abc-1"),)),
    Case("chat, two choices", "POST", CHAT, chat(n=2, temperature=1)),
    Case("chat, log probabilities", "POST", CHAT, chat(logprobs=True, top_logprobs=2)),
    Case("chat, token ids", "POST", CHAT, chat(return_token_ids=True)),
    Case("chat, no model named", "POST", CHAT, {k: v for k, v in chat().items() if k != "model"}),
    Case("chat, newer length field", "POST", CHAT, chat(max_tokens=9, max_completion_tokens=2)),
    Case("chat, null fields", "POST", CHAT, chat(n=None, stop=None, stream=None)),
    Case("chat, unknown field", "POST", CHAT, chat(zork=1)),
    Case("chat stream", "POST", CHAT, chat(stream=True)),
    Case("chat stream, usage", "POST", CHAT, chat(stream=True, stream_options=USAGE)),
    Case("chat stream, usage throughout", "POST", CHAT, chat(stream=True, stream_options=CONTINUOUS)),
    Case("chat stream, log probabilities", "POST", CHAT, chat(stream=True, logprobs=True, top_logprobs=1)),
    Case("completion", "POST", COMPLETION, completion()),
    Case(
        "completion, default length", "POST", COMPLETION, {"model": MODEL, "prompt": "a", "ignore_eos": True}
    ),
    Case("completion of ids", "POST", COMPLETION, completion([504, 3575, 282], return_token_ids=True)),
    Case("completions of a list", "POST", COMPLETION, completion(["a b", "c d"])),
    Case("completion, log probabilities", "POST", COMPLETION, completion(logprobs=2)),
    Case("completion, echo", "POST", COMPLETION, completion(echo=True)),
    Case("completion stream, usage", "POST", COMPLETION, completion(stream=True, stream_options=USAGE)),
    Case(
        "completion stream, ids and log probabilities",
        "POST",
        COMPLETION,
        completion(stream=True, return_token_ids=True, logprobs=1),
    ),
    Case("wrong model", "POST", CHAT, chat(model="nope")),
    Case("wrong model, stream", "POST", CHAT, chat(model="nope", stream=True)),
    Case("half an object", "POST", CHAT, raw='{"model": '),
    Case("no body", "POST", CHAT, raw=""),
    Case("a list for a body", "POST", CHAT, raw="[1]"),
    Case("not said to be JSON", "POST", CHAT, raw=json.dumps(chat()), headers=_TEXT),
    Case("no messages", "POST", CHAT, {"model": MODEL}),
    Case("no prompt", "POST", COMPLETION, {"model": MODEL}),
    Case("empty prompt", "POST", COMPLETION, completion("")),
    Case("empty list", "POST", COMPLETION, completion([])),
    Case("token id out of range", "POST", COMPLETION, completion([99_999_999])),
    Case("a word for a length", "POST", CHAT, chat(max_tokens="zz")),
    Case("no tokens wanted", "POST", CHAT, chat(max_tokens=0)),
    Case("more tokens than the context", "POST", CHAT, chat(max_tokens=50_000)),
    Case("prompt longer than the context", "POST", COMPLETION, completion("a " * 9_000)),
    Case("negative temperature", "POST", CHAT, chat(temperature=-1)),
    Case("top_p above 1", "POST", CHAT, chat(top_p=2)),
    Case("no choices wanted", "POST", CHAT, chat(n=0)),
    Case("too many log probabilities", "POST", CHAT, chat(logprobs=True, top_logprobs=99)),
    Case("top_logprobs alone", "POST", CHAT, chat(top_logprobs=2)),
    Case("least above most", "POST", CHAT, chat(min_tokens=9)),
    Case("stream options without a stream", "POST", CHAT, chat(stream_options=USAGE)),
    Case("empty cache salt", "POST", COMPLETION, completion(cache_salt="")),
    Case("tools without a parser", "POST", CHAT, chat(tools=[TOOL], tool_choice="auto")),
]


# What differs on purpose


@dataclass(frozen=True)
class Difference:
    """Something that is not compared, and why. A pattern names what it covers: `fields` of JSON by dotted
    path, of which only the type is compared; `metrics` by name, of which labels are not compared; `growth`,
    metrics whose growth is not compared."""

    what: str
    reason: str
    fields: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    growth: tuple[str, ...] = ()

    def patterns(self) -> Iterator[tuple[str, str]]:
        """(kind, pattern) of each."""
        for kind in ("fields", "metrics", "growth"):
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
        "Where KV lies",
        "Each engine numbers its own blocks and listens on its own port.",
        fields=("kv_transfer_params.remote_block_ids", "kv_transfer_params.remote_port"),
    ),
    Difference(
        "How long things take",
        "Time comes from a cost profile; how near it is to an engine's is a measurement of its own.",
        growth=("vllm:*_seconds_sum",),
    ),
    Difference(
        "NIXL descriptors",
        "NIXL counts pieces of memory in every layer of a model; the simulator has no layers and counts "
        "blocks.",
        growth=("vllm:nixl_num_descriptors_sum",),
    ),
    Difference(
        "Steps without a token",
        "vLLM does not count a step that gives no token, such as the first chunk of a long prompt; the "
        "simulator counts every step.",
        growth=("vllm:iteration_tokens_total_count",),
    ),
    Difference(
        "Time to first token of failed requests",
        "vLLM counts one for a request that failed before its first token too; the simulator counts tokens "
        "only.",
        growth=("vllm:time_to_first_token_seconds_count",),
    ),
    Difference(
        "Labels of the cache's configuration",
        "Those that no router or autoscaler reads are left out.",
        metrics=("vllm:cache_config_info",),
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


async def send(client: httpx.AsyncClient, engine: str, case: Case) -> httpx.Response:
    """Send a case to an engine, by its URL."""
    content = None if case.body is None else json.dumps(case.body)
    headers = {"content-type": "application/json", **dict(case.headers)}
    return await client.request(
        case.method,
        engine + case.path,
        content=content if case.raw is None else case.raw,
        headers=headers if case.method == "POST" else None,
    )


def seen(response: httpx.Response, covered: set[tuple[str, str]]) -> Seen:
    """`covered`: takes the patterns that hid something."""
    kind = response.headers.get("content-type")
    body: Json = None
    if kind == "application/json":
        body = shape(response.json(), covered=covered)
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


def unexpected(kind: str, differing: dict[str, Json], covered: set[tuple[str, str]]) -> dict[str, Json]:
    """Those of the differences, by metric, that the list does not cover. `covered` takes the patterns that
    do."""
    left = {}
    for name, values in differing.items():
        patterns = [
            p for d in DIFFERENCES for p in getattr(d, kind) if fnmatchcase(name.partition("{")[0], p)
        ]
        covered |= {(kind, pattern) for pattern in patterns}
        if not patterns:
            left[name] = values
    return left


# The page


_BEGIN = "<!-- differences: begin; written by tests/engines/contract.py -->\n"
_END = "<!-- differences: end -->\n"


def table() -> str:
    """The list as Markdown."""
    rows = [f"| {d.what} | {d.reason} | {_names(d)} |\n" for d in DIFFERENCES]
    return "| What differs | Why | Where |\n| --- | --- | --- |\n" + "".join(rows)


def _names(difference: Difference) -> str:
    return ", ".join(f"`{pattern}`" for _, pattern in difference.patterns())


def updated(page: str) -> str:
    """The page with the list as it is now."""
    written = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
    assert written.search(page), f"{PAGE} has lost its marks"
    return written.sub(lambda _: _BEGIN + table() + _END, page)


def faults_shown(page: str) -> list[str]:
    """The faults in the first column of the page's table of faults."""
    return re.findall(r"^\| `([^`|]+)` \|[^|]*\|$", page, re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text("utf-8")), "utf-8")
