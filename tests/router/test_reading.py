"""Large bodies are read in a process of their own: the same is made of them, and the loop stays free."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.router.body import LARGE_VALUE, MOST_FIELDS, Body
from tandem.router.classify import Api, refuse_internal
from tandem.router.errors import ApiError
from tandem.router.facts import decode_only_of
from tandem.router.helper_frames import Kind, header
from tandem.router.helper_process import HelperProcess, Limits
from tandem.router.plausible import is_plausible
from tandem.router.reading import HELP, LARGE, Reading

from .conftest import Start
from .fakes import local_counter

TEXT = 'naïve 数える \n"\\ \u00e9 ' * 6000
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    async with Reading(patience=60) as reading:
        yield reading


def said_of(api: Api, body: Body) -> list[Any]:
    """All that a router makes of a body, or the error."""
    told: list[Any] = []
    for ask in (
        lambda: refuse_internal(body, []),
        lambda: decode_only_of(api, body),
        lambda: is_plausible(api, body, 100, 1000),
        lambda: is_plausible(api, body, None, None),
        lambda: body.ids,
        lambda: json.loads(body.edited({"added": 1})),
        lambda: body.names(),
        lambda: [body.get(name) for name in ("model", "stream", "max_tokens")],
        lambda: body.decoded(),
    ):
        try:
            told.append(ask())
        except ApiError as error:
            told.append((error.status, error.message, error.param))
    return told


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "stream": True, "max_tokens": 5, "temperature": 0.10},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": TEXT}]}]},
        {"messages": MESSAGES, "n": 2},
        {"messages": MESSAGES, "stream": "yes"},
        {"messages": MESSAGES, "chat_template": "x"},
        {"messages": MESSAGES, "max_tokens": 0},
        {"messages": MESSAGES, "min_tokens": 10_000},
        {"messages": MESSAGES, "tool_choice": "required", "tools": [{"function": {"name": "f"}}] * 4000},
        {"messages": MESSAGES, "stop": ["x"] * 9},
        {"prompt": TEXT, "model": "m"},
        {"prompt": list(range(30_000))},
        {"prompt": ["a" * 99] * 3000},
        {"prompt": [[1, 2, 3] * 30_000]},
        {"prompt": None, "prompt_embeds": "x" * 100_000},
        {"prompt": "a", "suffix": "a" * 100_000, "echo": True},
        {"prompt": "x" * 70_000, "user": "x" * 70_000, "x": 1, "y": 1, "z": [1], "zz": [1, [1]]},
    ],
    ids=range(18),
)
@pytest.mark.parametrize("api", list(Api))
async def test_what_is_made_of_a_large_body_is_what_is_made_of_a_small_one(
    reading: Reading, fields: dict[str, Any], api: Api
) -> None:
    data = json.dumps(fields).encode()
    assert len(data) > LARGE
    body = await reading.read(data)
    assert body.facts is not None
    assert said_of(api, body) == said_of(api, Body.parse(data))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * LARGE, "not a JSON object"),
        (b'{"prompt": "' + b"x" * LARGE, "not a JSON object"),
        (
            json.dumps({"prompt": TEXT, "kv_transfer_params": {}}).encode(),
            "'kv_transfer_params' is set by the",
        ),
        (json.dumps({"prompt": TEXT, "vllm_xargs": []}).encode(), "'vllm_xargs' must be an object"),
        (
            json.dumps({"prompt": TEXT, "vllm_xargs": {"request_id": 1}}).encode(),
            "'vllm_xargs.request_id' is",
        ),
        (json.dumps({f"field {i}": 1 for i in range(90_000)}).encode(), f"at most {MOST_FIELDS} are taken"),
        (json.dumps({"prompt": TEXT, "stream": "\ud800"}).encode(), "not a JSON object"),
    ],
)
async def test_what_may_not_be_served_is_refused_all_the_same(
    reading: Reading, data: bytes, said: str
) -> None:
    with pytest.raises(ApiError, match=said) as error:
        await reading.read(data)
    assert error.value.status == 400


async def test_of_a_name_given_twice_the_last_value_counts(reading: Reading) -> None:
    data = b'{"prompt": "a", "model": "m", "prompt": "%b", "model": "n"}' % (b"x" * LARGE)
    body = await reading.read(data)
    assert json.loads(body.edited({})) == {"prompt": "x" * LARGE, "model": "n"}
    assert body.get("model") == "n"


async def test_what_is_large_is_not_decoded_in_the_loop(reading: Reading) -> None:
    """Whatever field it is: who sends megabytes in place of a number is told so."""
    for name in ("max_tokens", "cache_salt", "user", "truncate_prompt_tokens", "model"):
        body = await reading.read(json.dumps({"prompt": "a", name: [[]] * LARGE_VALUE}).encode())
        with pytest.raises(ApiError, match=f"'{name}' is too large for what it is for"):
            body.get(name)


BIG: dict[str, Callable[[int], bytes]] = {
    "text": lambda size: (
        b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"hello the " * (size // 10))
    ),
    "messages": lambda size: b'{"model":"m","messages":[%b{}]}' % (b"{}," * (size // 3)),
    "brackets": lambda size: b'{"model":"m","messages":[%b[]]}' % (b"[]," * (size // 3)),
    "fields": lambda size: b"{%b}" % b",".join(b'"%d":1' % i for i in range(size // 9)),
    "ids": lambda size: b'{"model":"m","prompt":[%b1]}' % (b"12345," * (size // 6)),
    "schema": lambda size: (
        b'{"model":"m","messages":[],"response_format":{"type":"json_schema","json_schema":{"name":"x",'
        b'"schema":{"x":[%b[]]}}}}' % (b"[]," * (size // 3))
    ),
}


@pytest.mark.parametrize("kind", BIG)
async def test_the_loop_stays_free_while_ten_megabytes_are_read(reading: Reading, kind: str) -> None:
    """By the processor's time that the loop itself takes, which others on the machine do not change."""
    data = BIG[kind](10_000_000)
    await reading.read(BIG["text"](100_000))  # the process is there
    before, longest = time.thread_time(), 0.0
    task = asyncio.create_task(reading.read(data))
    while not task.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
        await asyncio.sleep(0.001)
        before = time.thread_time()
    if kind == "fields":
        with pytest.raises(ApiError, match="fields"):
            await task
    else:
        body = await task
        begun = time.thread_time()
        api = Api.COMPLETIONS if kind == "ids" else Api.CHAT
        decode_only_of(api, body)
        is_plausible(api, body, 100, None)
        assert time.thread_time() - begun < 0.005
    assert longest < 0.05


async def test_small_bodies_need_no_process(reading: Reading) -> None:
    body = await reading.read(b'{"prompt": "a"}')
    assert body.facts is None
    assert reading._process.pid is None


@pytest.mark.parametrize("dies", ["at once", "in hand"])
async def test_without_the_process_large_bodies_are_read_here_and_larger_ones_can_come_again(
    dies: str,
) -> None:
    if dies == "at once":
        command: tuple[str, ...] = (sys.executable, "-c", "raise SystemExit(1)")
    else:
        lines = f"import os,sys,time; os.write(1, {header(Kind.READY, b'')!r}); time.sleep(0.2); os._exit(1)"
        command = (sys.executable, "-c", lines)
    process = HelperProcess(
        b"{}", command=command, name="it", meanwhile="", limits=Limits(patience=20), waits=True
    )
    async with Reading(process) as reading:
        data = json.dumps({"prompt": "x" * LARGE}).encode()
        body = await reading.read(data)
        assert body.facts is None
        assert body.get("prompt") == "x" * LARGE
        with pytest.raises(ApiError, match="Try again") as error:
            await reading.read(json.dumps({"prompt": "x" * HELP}).encode())
        assert (error.value.status, error.value.retry_after_s) == (503, 1)


async def test_it_is_replaced_when_it_dies_and_nothing_is_left_at_the_end() -> None:
    async with Reading() as reading:
        data = json.dumps({"prompt": "x" * LARGE}).encode()
        await reading.read(data)
        pid = reading._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while (await reading.read(data)).facts is None:
            await asyncio.sleep(0.01)
        other = reading._process.pid
        assert other not in (None, pid)
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
async def test_a_large_request_reaches_the_engines_as_it_was_sent(start: Start, path: str) -> None:
    endpoint = await start(local=local_counter())
    data = b'{"model":"m","temperature":0.10,"prompt":"%b","max_tokens":3}' % (b"x" * 90_000)
    answer = await endpoint.post(data, path)
    assert answer.status_code == 200
    (seen,) = endpoint.decode[0].requests
    assert b'"temperature":0.10' in seen.raw
    assert seen.body["prompt"] == "x" * 90_000
    assert (await endpoint.outcomes()) == {("disaggregated", "threshold", "ok"): 1.0}
    named = await endpoint.post(data, "/invocations", x_amzn_sagemaker_adapter_identifier="m")
    assert named.status_code == 200
