"""The traces of `make bench-routing`: prompts share as tokens exactly what they share in the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.http import Client, Origin
from tandem.prompt import load
from tandem.sim import CostProfile, EngineSpec, Fleet, parse, virtual

from .scripts import BENCHMARKS, scripts


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with scripts("routing", "traces", "replay") as found:
        yield found


@pytest.fixture(scope="module")
def traces(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["traces"]


@pytest.fixture(scope="module")
def replay(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["replay"]


@pytest.fixture(scope="module")
def model(traces: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = traces.write_model(tmp_path_factory.mktemp("model"))
    return folder


def shared(one: list[Any], other: list[Any]) -> int:
    """Length of the prefix that two sequences share."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def engine(model: Path) -> EngineSpec:
    return EngineSpec(parse(["--model", str(model), "--served-model-name", "m", "--block-size", "16"]))


def entries(first: int, end: int) -> list[dict[str, Any]]:
    lines = (BENCHMARKS / "routing" / "data" / "mooncake_conversation_2000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[first:end]]


def test_prompts_have_the_traces_tokens_and_share_its_blocks(traces: ModuleType, model: Path) -> None:
    counter = load(model)
    requests = traces.load(requests=1360)[1260:]
    ids = [counter.completion({"prompt": r.text}).ids for r in requests]
    given = entries(1260, 1360)
    assert [len(i) for i in ids] == [e["input_length"] for e in given] == [r.prompt_tokens for r in requests]
    assert [r.output_tokens for r in requests] == [e["output_length"] for e in given]
    pairs = 0
    for i in range(100):
        for j in range(i):
            blocks = shared(given[i]["hash_ids"], given[j]["hash_ids"])
            tokens = shared(ids[i], ids[j])
            assert tokens // 512 == blocks
            assert tokens % 512 < 8, "beyond the block they only agree by chance"
            pairs += blocks > 1
    assert pairs, "nothing of it is shared"


def test_a_simulated_engine_counts_these_tokens(traces: ModuleType, model: Path) -> None:
    requests = traces.load(requests=12)

    async def counts() -> list[int]:
        client, found = Client(), []
        async with Fleet([engine(model)]) as fleet:
            for request in requests:
                body = json.dumps({"prompt": request.text}).encode()
                origin, header = Origin.parse(fleet.urls[0]), [(b"content-type", b"application/json")]
                async with client.stream(origin, "POST", b"/tokenize", header, body) as response:
                    found.append(json.loads(await response.read(1 << 24))["count"])
            await client.aclose()
        return found

    assert virtual.run(counts()) == [r.prompt_tokens for r in requests]


def test_the_model_takes_any_text(model: Path) -> None:
    tricky = "Übung, 数える 🚲\n\t  two  spaces <|end|>"
    assert load(model).completion({"prompt": tricky}).count > 10


def test_shorter_blocks_keep_what_is_shared(traces: ModuleType) -> None:
    whole, short = traces.load(requests=200), traces.load(requests=200, block=64, most_output=16)
    for long, brief in zip(whole, short, strict=True):
        assert [stream for stream, _ in long.pieces] == [stream for stream, _ in brief.pieces]
        assert all(tokens == 64 for _, tokens in brief.pieces[:-1])
        assert brief.prompt_tokens == pytest.approx(long.prompt_tokens / 8, abs=1)
        assert brief.output_tokens <= 16


def test_spreading_keeps_order_and_tick(traces: ModuleType) -> None:
    requests = traces.load(requests=300)
    moved = traces.spread(requests, seed=1)
    assert [r.number for r in moved] == list(range(300))
    assert all(0 <= m.at - r.at <= 3 for m, r in zip(moved, requests, strict=True))
    assert len({r.at for r in moved}) == 300
    assert moved == traces.spread(requests, seed=1) != traces.spread(requests, seed=2)


def request(traces: ModuleType, number: int, blocks: list[int], tail: int = 0) -> Any:
    pieces = [(b, 512) for b in blocks] + ([(-1 - number, tail)] if tail else [])
    return traces.TraceRequest(number, float(number), tuple(pieces), 1)


def test_the_bound_is_one_cache_that_keeps_what_was_used_last(traces: ModuleType) -> None:
    def bound(blocks: int, *asked: list[int], tail: int = 0) -> float:
        found: float = traces.bound([request(traces, n, a, tail) for n, a in enumerate(asked)], blocks)
        return found

    assert bound(10, [1, 2], [1, 2], tail=512) == pytest.approx(2 / 6)
    assert bound(10, [1, 2], [1, 2]) == pytest.approx(1 / 4), "the last token is always computed"
    assert bound(10, [1, 2], [9, 2], tail=1) == 0, "only prefixes are found"
    # Three blocks: the third prompt evicts the second's, as the first's was used again; of it, the end.
    assert bound(3, [1, 2], [3], [1], [4], [1, 2], tail=1) * (7 * 512 + 5) == pytest.approx(2 * 512)


def test_the_hot_prefix_is_shared_by_its_part(traces: ModuleType) -> None:
    requests = traces.hot_prefix(400, 2.0, seed=3)
    hot = [r for r in requests if r.pieces[0] == (0, 8000)]
    assert len(hot) / 400 == pytest.approx(0.8, abs=0.06)
    assert requests[-1].at == pytest.approx(200, rel=0.2)
    assert shared(hot[0].text.split(), hot[1].text.split()) in range(8000, 8008)
    others = [r for r in requests if r not in hot]
    assert shared(others[0].text.split(), hot[0].text.split()) < 8
    assert len({stream for r in requests for stream, _ in r.pieces}) == 401


def test_a_replay_sends_at_the_traces_times_and_tells_of_each_answer(
    traces: ModuleType, replay: ModuleType, model: Path
) -> None:
    profile = CostProfile(
        step=0.01, prefill_token=0.001, prefill_attention=0, decode_sequence=0, decode_context=0
    )
    asked = [traces.TraceRequest(i, at, ((i, 100 + i),), 4) for i, at in enumerate((0.0, 3.0, 9.0))]

    async def answers(model_name: str) -> list[Any]:
        async with Fleet([engine(model)], profile=profile, environment={}) as fleet:
            found: list[Any] = await replay.replay(asked, fleet.urls[0], model_name, speed=3.0)
            return found

    good = virtual.run(answers("m"))
    assert [a.sent for a in good] == pytest.approx([0.0, 1.0, 3.0])
    assert [a.ttft for a in good] == pytest.approx([0.110, 0.111, 0.112])
    assert [a.latency for a in good] == pytest.approx([0.140, 0.141, 0.142])
    assert [a.tokens for a in good] == [4, 4, 4]
    figures = replay.figures(good, 3.0)
    assert figures["errors"] == figures["short_answers"] == 0
    assert figures["ttft_p50"] == pytest.approx(0.111)
    assert figures["seconds"] == pytest.approx(3.142)
    bad = virtual.run(answers("another"))
    assert ["404" in a.error for a in bad] == [True] * 3
    assert replay.figures(bad, 3.0)["errors"] == 3


def test_a_request_names_its_conversation(traces: ModuleType) -> None:
    first, again, other = (request(traces, n, blocks) for n, blocks in enumerate(([0, 1], [0, 1, 2], [0, 3])))
    assert first.session == again.session != other.session
    assert request(traces, 9, [7]).session == "7"
