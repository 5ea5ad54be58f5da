"""Numbers that engines report: one that cannot be true changes nothing, and breaks nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tandem.http import Request, Responder
from tandem.router.engine_metrics import read
from tandem.router.relay import judge
from tandem.router.reported import MOST_CACHED, MOST_REQUESTS, MOST_TOKENS, NO_USAGE, count, measure

from .conftest import Start
from .fakes import JSON, FakeEngine, Seen, completion

ODD: tuple[Any, ...] = (
    -1,
    -(10**30),
    10**30,
    2**63,
    1.5,
    -0.5,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "7",
    None,
    [7],
    {},
)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_what_is_no_number_of_anything_is_not_believed(odd: Any) -> None:
    assert count(odd) is None


@pytest.mark.parametrize(("told", "meant"), [(0, 0), (7, 7), (7.0, 7), (MOST_TOKENS, MOST_TOKENS)])
def test_a_whole_number_within_reason_is_one(told: float, meant: int) -> None:
    found = count(told)
    assert found == meant
    assert isinstance(found, int)
    assert count(0, least=1) is None


@pytest.mark.parametrize("told", [-0.1, 1.1, math.nan, math.inf, None])
def test_a_part_of_a_whole_lies_between_nothing_and_all(told: float | None) -> None:
    assert measure(told, 1.0) is None
    assert measure(0.5, 1.0) == 0.5


def _json(value: Any) -> bool:
    return not (isinstance(value, float) and not math.isfinite(value))


@pytest.mark.parametrize(
    "usage", [*filter(_json, ODD), *({"completion_tokens": odd} for odd in ODD if _json(odd))]
)
def test_an_answer_is_one_whatever_its_usage_says(usage: Any) -> None:
    body = json.dumps({**completion("x"), "usage": usage}).encode()
    assert judge(body) == (None, NO_USAGE)


METRICS = (
    'process_start_time_seconds {0}\nvllm:kv_cache_usage_perc{{engine="0"}} {0}\n'
    'vllm:num_requests_running{{engine="0"}} {0}\nvllm:num_requests_waiting{{engine="0"}} {0}\n'
    'vllm:cache_config_info{{block_size="{0}",num_gpu_blocks="{0}",kv_cache_size_tokens="{0}"}} 1.0\n'
)


@pytest.mark.parametrize(
    "odd", ["-1", "NaN", "+Inf", "-Inf", "1e300", "9" * 15, "9" * 400, "text", "", "0x7"]
)
def test_a_page_of_metrics_tells_nothing_that_cannot_be(odd: str) -> None:
    told = read(METRICS.format(odd).encode())
    assert told.kv_use is None
    assert told.running is told.waiting is None
    assert told.block_size is None
    assert told.cache_tokens is None
    assert told.started is None or 0 <= told.started <= 1e12


def test_what_many_ranks_report_together_stays_within_reason() -> None:
    lines = "".join(f'vllm:num_requests_running{{engine="{i}"}} {MOST_REQUESTS}\n' for i in range(50))
    assert read(lines.encode()).running == MOST_REQUESTS
    large = 'vllm:cache_config_info{block_size="99999999",num_gpu_blocks="999999999999999"} 1.0\n'
    assert read(large.encode()).cache_tokens is None
    assert MOST_CACHED < 99_999_999 * 999_999_999_999_999


class Boaster(FakeEngine):
    """Answers /tokenize with a count that no prompt has."""

    said: Any = -5

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.path == "/tokenize":
            responder.send(200, JSON, json.dumps({"count": self.said, "tokens": []}).encode())
        else:
            await super()._answer(request, responder)


@pytest.mark.parametrize("said", [-1, -(10**30), 10**30])
async def test_a_prompt_that_an_engine_counts_absurdly_is_one_that_was_not_counted(
    start: Start, said: int
) -> None:
    def boast(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[:] = [Boaster("d0")]

    endpoint = await start(before=boast, wait=True)
    endpoint.decode[0].said = said  # type: ignore[attr-defined]
    for stream in (False, True):
        answer = await endpoint.post({"model": "m", "prompt": "x" * 30, "stream": stream})
        assert answer.status_code == 200
    assert await endpoint.metric("tandem_prompt_tokens_total") == 0
    for engine in endpoint.app.fleet.engines:
        assert (engine.pending_tokens, engine.held_tokens) == (0, 0)


@pytest.mark.parametrize("usage", [{"completion_tokens": -(10**9)}, {"completion_tokens": 10**30}, "none"])
async def test_an_engine_that_reports_an_absurd_usage_is_answered_for_and_not_believed(
    start: Start, usage: Any
) -> None:
    def boast(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.send(200, JSON, json.dumps({**completion("x"), "usage": usage}).encode())
        return True

    endpoint = await start(prefill=0, routing_threshold=10_000)
    endpoint.decode[0].on_generate = boast
    for _ in range(3):
        answer = await endpoint.post({"model": "m", "prompt": "x"})
        assert answer.status_code == 200
        assert answer.json()["usage"] == usage, "the answer is the engine's"
    expected = endpoint.app._flow._choosing.outputs.expect(None)
    assert 0 <= expected <= 10_000


@pytest.mark.parametrize("length", [10**30, 2**63, MOST_TOKENS + 1])
async def test_a_context_that_no_model_has_is_not_known(start: Start, length: int) -> None:
    def boast(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        for each in decode:
            each.max_model_len = length

    endpoint = await start(before=boast)
    assert endpoint.app.fleet.group("m").max_model_len is None
    assert (await endpoint.client.get("/v1/models")).status_code == 200
    assert (await endpoint.post({"model": "m", "prompt": "x" * 30, "max_tokens": 7})).status_code == 200
