"""Large prompts are counted in a process of its own: the same ids, a free loop, nothing left at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, cast

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tandem.config import RouterConfig
from tandem.prompt import BadPrompt, NotExact, TooLong
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting_places import InLoop, InProcesses
from tandem.router.counting_process import CountingProcess
from tandem.router.errors import ApiError
from tandem.router.helper_frames import Kind, header
from tandem.router.helper_process import Limits, Unavailable, Unusable
from tandem.router.local_counter import load_counter

from .conftest import Start
from .fakes import FakeEngine

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "rivers",
    "stones",
    "seven",
    "machine",
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a kind that the fast library does not take: its tokenizing takes long."""
    folder = tmp_path_factory.mktemp("model")
    pieces = ["[UNK]", *map(chr, range(33, 127)), *(f"##{chr(c)}" for c in range(33, 127)), *WORDS]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": []}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'none' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    )
    return folder


@pytest.fixture
def config(model: Path) -> RouterConfig:
    return RouterConfig(decode=("http://127.0.0.1:1",), model_path=str(model))


@pytest.fixture
async def process(config: RouterConfig) -> AsyncIterator[CountingProcess]:
    async with CountingProcess(config, limits=Limits(patience=60, huge=2**22)) as process:
        yield process


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def text(tokens: int) -> str:
    return " ".join(WORDS[i * i % len(WORDS)] for i in range(tokens))


def gone(pid: int) -> bool:
    """Whether nothing is left of a process, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


async def child_of(process: CountingProcess) -> int:
    await process.count(Api.COMPLETIONS, body(prompt="the fox"))
    assert process.pid is not None
    return process.pid


class Noted(CountingProcess):
    """Notes what is counted by processes."""

    made = 0
    asked: ClassVar[list[bytes]] = []

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        Noted.made += 1

    async def count(self, api: Api, data: bytes) -> Sequence[int]:
        Noted.asked.append(data)
        return await super().count(api, data)


@pytest.mark.parametrize(("option", "made", "asked"), [(100, 1, [200]), (300, 1, []), (0, 0, [])])
async def test_the_option_says_from_which_size_on_a_router_counts_in_a_process(
    option: int,
    made: int,
    asked: list[int],
    config: RouterConfig,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Noted.made, Noted.asked[:] = 0, []
    monkeypatch.setattr("tandem.router.app.CountingProcess", Noted)
    local = load_counter(config)
    assert local is not None

    def counts_alike(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        for engine in decode:
            engine.tokens = lambda b: (local.completion(b) if "prompt" in b else local.chat(b)).count
            engine.knows_ids = False

    endpoint = await start(
        local=local,
        before=counts_alike,
        model_path=config.model_path,
        count_in_process_bytes=option,
        routing_threshold=1,
        explain=True,
    )
    asks = len(endpoint.decode[0].tokenized)
    sent = body(model="m", prompt="fox " * 40)
    sent += b" " * (200 - len(sent))
    answer = await endpoint.post(sent, x_tandem_explain="1")
    assert answer.headers["x-tandem-prompt-tokens"] == "40"
    assert (Noted.made, [len(data) for data in Noted.asked]) == (made, asked)
    assert len(endpoint.decode[0].tokenized) == asks, "no engine was asked"


@pytest.mark.parametrize(("option", "remembers"), [(0, False), (100_000, True)])
def test_the_option_bounds_what_is_remembered_of_chats(
    option: int, remembers: bool, config: RouterConfig
) -> None:
    counter = load_counter(dataclasses.replace(config, count_cache_bytes=option))
    assert counter is not None
    for i in range(100):
        counter.chat({"messages": [{"role": "user", "content": f"{i} {text(300)}"}]})
    assert (counter.remembered_bytes > 0) == remembers
    assert counter.remembered_bytes <= option


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.COMPLETIONS, {"prompt": "the lazy dog\x00 ünd 🚲"}),
        (Api.COMPLETIONS, {"prompt": [1, 2, 4_000_000_000]}),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2}),
        (Api.CHAT, {"messages": [{"role": "user", "content": text(3000)}], "temperature": 0}),
    ],
)
async def test_ids_are_those_that_are_counted_here(
    process: CountingProcess, config: RouterConfig, api: Api, fields: dict[str, Any]
) -> None:
    local = load_counter(config)
    assert local is not None
    expected = local.chat(fields) if api is Api.CHAT else local.completion(fields)
    assert list(await process.count(api, body(**fields))) == expected.ids


@pytest.mark.parametrize(
    ("api", "data", "error", "param"),
    [
        (Api.CHAT, body(messages=[{"role": "none", "content": ""}]), BadPrompt, "messages"),
        (Api.COMPLETIONS, body(prompt=["a", "b"]), NotExact, None),
        (Api.COMPLETIONS, body(prompt=[1, -1]), NotExact, None),
        (Api.COMPLETIONS, b'{"prompt": "\\ud800"}', ApiError, None),
        (Api.COMPLETIONS, b"[]", ApiError, None),
    ],
)
async def test_what_cannot_be_counted_is_said_as_it_would_be_here(
    process: CountingProcess, api: Api, data: bytes, error: type[Exception], param: str | None
) -> None:
    with pytest.raises(error) as raised:
        await process.count(api, data)
    assert getattr(raised.value, "param", None) == param
    assert await process.count(Api.COMPLETIONS, body(prompt="the fox")), "and the next one is counted"


async def test_requests_are_answered_each_with_its_own_count(process: CountingProcess) -> None:
    sizes = [1, 500, 3, 2000, 40, 1000]
    counts = await asyncio.gather(*(process.count(Api.COMPLETIONS, body(prompt=text(n))) for n in sizes))
    assert [len(ids) for ids in counts] == sizes


async def test_one_whose_client_leaves_does_not_mix_up_the_others(process: CountingProcess) -> None:
    await child_of(process)
    asked = [asyncio.create_task(process.count(Api.COMPLETIONS, body(prompt=text(n)))) for n in (900, 5, 7)]
    await asyncio.sleep(0)
    asked[0].cancel()  # it is in hand
    asked[1].cancel()  # it waits
    assert len(await asked[2]) == 7
    assert len(await process.count(Api.COMPLETIONS, body(prompt=text(9)))) == 9


async def test_the_loop_stays_free_while_a_hundred_thousand_tokens_are_counted(
    process: CountingProcess, config: RouterConfig
) -> None:
    """Compared with the same ticker while nothing is counted, and while the loop itself counts."""
    local = load_counter(config)
    assert local is not None
    await child_of(process)
    loop = asyncio.get_running_loop()

    async def gaps(work: Callable[[], Any], least: int) -> list[float]:
        done = asyncio.ensure_future(work())
        seen, last = [], loop.time()
        while not done.done() or len(seen) < least:
            await asyncio.sleep(0.01)
            seen.append(loop.time() - last)
            last = loop.time()
        await done
        return seen

    async def nothing() -> None: ...

    async def by_process() -> None:
        assert len(await process.count(Api.COMPLETIONS, body(prompt=prompt))) == 100_000

    async def in_loop() -> None:
        assert local.completion({"prompt": prompt}).count == 100_000

    prompt = text(100_000)
    for tries_left in (2, 1, 0):  # others may use the machine
        idle, meanwhile, blocked = (
            await gaps(nothing, 30),
            await gaps(by_process, 30),
            await gaps(in_loop, 30),
        )
        if max(meanwhile) < 3 * max(idle) and max(meanwhile) < max(blocked) / 3:
            break
        assert tries_left, f"idle {max(idle)}, counting {max(meanwhile)}, in the loop {max(blocked)}"
    assert median(meanwhile) < 2 * median(idle)


async def test_a_process_that_dies_is_replaced_and_its_request_is_left_to_an_engine(
    process: CountingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    pid = await child_of(process)
    asked = asyncio.create_task(process.count(Api.COMPLETIONS, body(prompt=text(300_000))))
    waits = asyncio.create_task(process.count(Api.COMPLETIONS, body(prompt="the fox")))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await asked
    assert len(await waits) == 2, "one that only waited is counted by the next process"
    assert process.pid not in (None, pid)
    assert gone(pid)
    assert "the counting process died" in caplog.text


async def test_one_that_dies_again_at_once_is_not_replaced_for_a_while(config: RouterConfig) -> None:
    now = 1000.0
    async with CountingProcess(config, limits=Limits(patience=60, lives=60), clock=lambda: now) as process:
        for _ in range(2):
            os.kill(await child_of(process), signal.SIGKILL)
            with suppress(Unavailable):
                await process.count(Api.COMPLETIONS, body(prompt="the fox"))
        now += 59
        with pytest.raises(Unavailable, match="does not stay alive"):
            await process.count(Api.COMPLETIONS, body(prompt="the fox"))
        now += 1
        assert len(await process.count(Api.COMPLETIONS, body(prompt="the fox"))) == 2


def fake(script: str) -> tuple[str, ...]:
    """A child that says it is ready and then runs these lines; frames are read by `frame()`."""
    start = f"""
import os, struct, sys, time
def frame():
    kind, length = struct.unpack("<BI", sys.stdin.buffer.read(5))
    return sys.stdin.buffer.read(length)
def say(data):
    os.write(1, data)
frame()
say({header(Kind.READY, b"")!r})
"""
    return sys.executable, "-c", start + script


@pytest.mark.parametrize(
    "script",
    [
        "frame(); sys.stdin.buffer.read()",  # hangs
        "frame(); say(b'nonsense in place of a frame')",
        "frame(); say(b'\\x11\\xff')",  # half a header
        "frame(); sys.exit(3)",
        "sys.exit(0)",
    ],
)
async def test_a_process_that_does_not_answer_costs_one_request_its_patience(
    script: str, config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(patience=30, longest=2)
    async with CountingProcess(config, command=fake(script), limits=limits) as process:
        with pytest.raises(Unavailable):
            await process.count(Api.COMPLETIONS, body(prompt="a"))
    assert "counting process" in caplog.text


async def test_prompts_that_were_counted_before_the_process_died_are_and_the_others_in_hand_are_not(
    config: RouterConfig,
) -> None:
    """Small prompts are handed over together; each frame of the fake answers the next."""
    ids = header(Kind.IDS, b"\0" * 8) + b"\0" * 8
    script = f"frame(); frame(); frame(); say({ids!r}); sys.exit(1)"
    async with CountingProcess(config, command=fake(script), limits=Limits(patience=30)) as process:
        await process.ready()
        counts = [process.count(Api.COMPLETIONS, body(prompt="a")) for _ in range(3)]
        first, *others = await asyncio.gather(*counts, return_exceptions=True)
    assert list(cast("Sequence[int]", first)) == [0, 0]
    assert [type(each) for each in others] == [Unavailable, Unavailable]


async def test_who_waits_too_long_or_finds_a_full_queue_is_left_to_an_engine(config: RouterConfig) -> None:
    never = fake("frame(); sys.stdin.buffer.read()")
    limits = Limits(patience=0.3, longest=30, waiting=2)
    async with CountingProcess(config, command=never, limits=limits) as process:
        waiting = [asyncio.create_task(process.count(Api.COMPLETIONS, b"{}")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="2 bodies wait"):
            await process.count(Api.COMPLETIONS, b"{}")
        for task in waiting:
            with pytest.raises(Unavailable, match="no answer of the counting process within"):
                await task


async def test_a_process_that_cannot_load_the_model_leaves_all_to_the_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RouterConfig(decode=("http://127.0.0.1:1",), model_path=str(tmp_path / "nowhere"))
    async with CountingProcess(config) as process:
        with pytest.raises(Unavailable):
            await process.count(Api.COMPLETIONS, body(prompt="a"))
        with pytest.raises(Unusable, match="nowhere"):
            await process.ready()
    assert "the counting process cannot work, so engines count its prompts: " in caplog.text


async def test_nothing_is_left_at_the_end(config: RouterConfig) -> None:
    process = CountingProcess(config)
    async with process:
        pid = await child_of(process)
        waits = asyncio.create_task(process.count(Api.COMPLETIONS, body(prompt=text(300_000))))
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="has ended"):
        await waits
    with pytest.raises(Unavailable, match="has ended"):
        await process.count(Api.COMPLETIONS, body(prompt="a"))
    assert gone(pid)


@pytest.mark.parametrize("of_another", [False, True])
async def test_what_is_asked_while_it_ends_starts_nothing(config: RouterConfig, of_another: bool) -> None:
    never = fake("frame(); sys.stdin.buffer.read()")
    limits = Limits(patience=30, huge=10)
    process = CountingProcess(config, command=never, limits=limits)
    async with process, CountingProcess(config, command=never, limits=limits) as other:
        other.beyond = process
        waits = asyncio.create_task(process.count(Api.COMPLETIONS, b"0123456789"))
        await asyncio.sleep(0)
        assert process._huge is not None
        await process._huge.started()
        closing = asyncio.create_task(process.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        with pytest.raises(Unavailable, match="has ended"):
            await (other if of_another else process).count(Api.COMPLETIONS, b"0123456789")
        await closing
        assert process._huge is None
        with pytest.raises(Unavailable, match="has ended"):
            await waits


async def test_where_no_process_can_be_started_engines_count_at_once(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(patience=600)
    async with CountingProcess(config, command=("/nowhere/python",), limits=limits) as process:
        for why in ("does not start", "does not stay alive"):
            with pytest.raises(Unavailable, match=why):
                await process.count(Api.COMPLETIONS, b"{}")
    assert "the counting process died (FileNotFoundError)" in caplog.text


ROUTER = """
import asyncio, json, sys
from tandem.config import RouterConfig
from tandem.router.classify import Api
from tandem.router.counting_places import InLoop
from tandem.router.counting_process import CountingProcess

async def main():
    config = RouterConfig(decode=("http://127.0.0.1:1",), model_path=sys.argv[1])
    async with CountingProcess(config) as process:
        await process.count(Api.COMPLETIONS, b'{"prompt": "the fox"}')
        asyncio.create_task(process.count(Api.COMPLETIONS, json.dumps({"prompt": "a " * 200_000}).encode()))
        await asyncio.sleep(0)
        print(process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_ends_with_a_router_that_was_killed(model: Path) -> None:
    command = [sys.executable, "-c", ROUTER, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        child = os.pidfd_open(int(router.stdout.readline()))
        try:
            router.kill()
            assert select.select([child], [], [], 60)[0], "it has ended"
        finally:
            os.close(child)


def test_signals_to_the_whole_group_are_the_routers_business(config: RouterConfig) -> None:
    """While the router drains it still counts."""

    async def run() -> None:
        async with CountingProcess(config, limits=Limits(patience=60)) as process:
            pid = await child_of(process)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            assert await child_of(process) == pid

    asyncio.run(run())


async def test_small_prompts_do_not_wait_for_a_huge_one(config: RouterConfig) -> None:
    """It is counted in a process of its own, which is there once it is needed."""
    async with CountingProcess(config, limits=Limits(patience=60, huge=100_000)) as process:
        pid = await child_of(process)
        assert process._huge is None
        huge = asyncio.create_task(process.count(Api.COMPLETIONS, body(prompt=text(150_000))))
        small = [await process.count(Api.COMPLETIONS, body(prompt="the fox")) for _ in range(20)]
        assert not huge.done()
        assert [len(ids) for ids in small] == [2] * 20
        assert len(await huge) == 150_000
        other = process._huge.pid if process._huge is not None else None
        assert other not in (None, pid)
    assert other is not None
    assert gone(other)
    assert gone(pid)


async def test_only_a_few_huge_prompts_wait(config: RouterConfig) -> None:
    never = fake("frame(); sys.stdin.buffer.read()")
    limits = Limits(patience=0.5, longest=30, huge=10, huge_waiting=2)
    async with CountingProcess(config, command=never, limits=limits) as process:
        waiting = [asyncio.create_task(process.count(Api.COMPLETIONS, b"0123456789")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="2 bodies wait for the counting process of huge bodies"):
            await process.count(Api.COMPLETIONS, b"0123456789")
        await asyncio.gather(*waiting, return_exceptions=True)


def nested(depth: int, leaves: int) -> dict[str, Any]:
    """Tools whose parameters are nested deeply: a few kilobytes of JSON, megabytes when they are indented."""
    inner: Any = [1] * leaves
    for _ in range(depth):
        inner = [inner]
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"p": inner}}}]}


CHAT = {"messages": [{"role": "user", "content": "the fox"}]}


@pytest.fixture
def indenting(model: Path, tmp_path: Path) -> RouterConfig:
    """A model whose template prints tools with an indent."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}<|end|>{% endfor %}{{ tools | tojson(indent=4) }}"
    )
    return RouterConfig(decode=("http://127.0.0.1:1",), model_path=str(model), chat_template=str(template))


async def test_what_a_template_makes_much_of_is_counted_elsewhere_and_alike(indenting: RouterConfig) -> None:
    local = load_counter(indenting)
    assert local is not None
    async with CountingProcess(indenting, limits=Limits(patience=60)) as process:
        place = InLoop(local, process, 65_536)
        for depth, leaves, there in ((3, 20, 0), (50, 1000, 1), (200, 3000, 2)):
            sent = body(**CHAT, **nested(depth, leaves))
            assert len(sent) < 65_536
            before = counted_by(process)
            ids = await place.count(Api.CHAT, Body.parse(sent))
            asked = [after - b for after, b in zip(counted_by(process), before, strict=True)]
            assert asked == [int(there > 0), int(there > 1)]
            assert list(ids) == local.chat(json.loads(sent)).ids


@pytest.mark.parametrize(("option", "elsewhere"), [(0, False), (400_000, False), (150_000, True)])
async def test_with_fetched_files_a_text_is_as_long_as_the_option_says(
    indenting: RouterConfig, option: int, elsewhere: bool
) -> None:
    """A body that counts as small waits with the huge ones only for what a template makes of it."""
    config = dataclasses.replace(indenting, count_in_process_bytes=option, model_path=None)
    assert indenting.model_path is not None
    place = await InProcesses.start(config, Path(indenting.model_path))
    try:
        sent = body(messages=[{"role": "user", "content": text(20_000)}], **nested(30, 3000))
        assert 100_000 < len(sent) < 150_000
        assert len(await place.count(Api.CHAT, Body.parse(sent))) > 20_000
        assert place.small.answers == 1
        assert place.small._huge is None
        assert (place.large is not None and place.large._huge is not None) == elsewhere
    finally:
        await place.aclose()


def counted_by(process: CountingProcess) -> tuple[int, int]:
    """How many answers it, and the one for what is huge, have given."""
    return process.answers, process._huge.answers if process._huge is not None else 0


@pytest.mark.parametrize("field", ["tools", "documents", "chat_template_kwargs", "tool_calls"])
def test_what_would_be_rendered_without_end_is_refused_soon_and_says_so(
    model: Path, tmp_path: Path, field: str
) -> None:
    inner: Any = [1] * 15_000
    for _ in range(400):
        inner = [inner]
    template, fields = "{{ tools | tojson(indent=4) }}", dict(CHAT)
    match field:
        case "tools":
            fields |= nested(400, 15_000)
        case "documents":
            template = "{% for i in range(99) %}{{ documents | tojson }}{% endfor %}"
            fields["documents"] = [{"text": "x" * 200_000}]  # type: ignore[list-item]
        case "chat_template_kwargs":
            template = "{{ more | tojson(indent=4) }}"
            fields["chat_template_kwargs"] = {"more": inner}  # type: ignore[assignment]
        case _:
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps({"a": inner})},
            }
            template = "{{ messages | tojson(indent=4) }}"
            fields["messages"] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    path = tmp_path / "template.jinja"
    path.write_text(template)
    config = RouterConfig(decode=("http://127.0.0.1:1",), model_path=str(model), chat_template=str(path))
    local = load_counter(config)
    assert local is not None
    with pytest.raises(BadPrompt, match="makes more than 16777216 characters"):
        local.chat(fields)
    started = time.thread_time()
    with pytest.raises(TooLong):
        local.chat(fields, 131_072)
    assert time.thread_time() - started < 0.1, "what the loop gives up costs it little"
