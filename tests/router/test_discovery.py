"""Several sources of engines as one, and the sources that a configuration names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.config import RouterConfig, Subscription
from tandem.router.discovery import Discovery, Member, MergedDiscovery, Source, StaticDiscovery, discovery
from tandem.router.engines import EngineRole

A = Member("http://10.0.0.1:8081", EngineRole.PREFILL)
B = Member("http://10.0.0.2:8081", EngineRole.DECODE)
C = Member("http://10.0.0.3:8081", EngineRole.DECODE)


class Told(Discovery):
    """A source that tells what a test makes it tell."""

    trouble: str | None = None

    def __init__(self, *members: Member) -> None:
        self.changes: asyncio.Queue[frozenset[Member] | Exception] = asyncio.Queue()
        self.watched = 0
        self.left = 0
        if members:
            self.tell(*members)

    def tell(self, *members: Member) -> None:
        self.changes.put_nowait(frozenset(members))

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        self.watched += 1
        try:
            while True:
                change = await self.changes.get()
                if isinstance(change, Exception):
                    raise change
                yield change
        finally:
            self.left += 1


class Pause:
    """A sleep that lasts until a test ends it."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.began = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.began.set()
        await self.over.wait()


async def until(watching: AsyncIterator[frozenset[Member]], *members: Member) -> None:
    """Until these are told; sources that speak at the same time may be told one by one."""
    while await anext(watching) != frozenset(members):
        pass


async def test_engines_of_all_sources_are_told_as_they_change() -> None:
    first, second = Told(A), Told(B)
    merged = MergedDiscovery({"first": first, "second": second})
    watching = aiter(merged.watch())
    await until(watching, A, B)
    second.tell(B, C)
    assert await anext(watching) == {A, B, C}
    first.tell()
    assert await anext(watching) == {B, C}
    second.trouble = "a typo"
    assert merged.sources() == [Source("first", 0, None), Source("second", 2, "a typo")]


async def test_a_source_that_is_silent_keeps_nobody_waiting() -> None:
    merged = MergedDiscovery({"silent": Told(), "command line": StaticDiscovery([A])})
    assert await anext(aiter(merged.watch())) == {A}


async def test_what_changes_nothing_is_not_told() -> None:
    first, second = Told(A, B), Told(C)
    watching = aiter(MergedDiscovery({"first": first, "second": second}).watch())
    await until(watching, A, B, C)
    first.tell(B, A)
    following = asyncio.ensure_future(anext(watching))
    while not first.changes.empty():
        await asyncio.sleep(0)
    second.tell()
    assert await following == {A, B}


async def test_of_an_engine_in_two_sources_the_first_ones_word_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = Member("http://e:1", EngineRole.PREFILL), Member("http://e:1", EngineRole.DECODE)
    first, second = Told(here), Told(there)
    watching = aiter(MergedDiscovery({"command line": first, "file x": second}).watch())
    await until(watching, here)
    second.tell(there, B)
    await until(watching, here, B)
    second.tell(there, C)
    await until(watching, here, C)
    assert caplog.messages == [
        "1 engines of the source 'file x' are named by 'command line' too, which counts: http://e:1"
    ]
    first.tell()
    assert await anext(watching) == {there, C}


async def test_thousands_of_engines_in_two_sources_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def members(role: EngineRole) -> list[Member]:
        return [Member(f"http://e{n:04}:1", role) for n in range(5000)]

    first, second = Told(*members(EngineRole.PREFILL)), Told(*members(EngineRole.DECODE))
    watching = aiter(MergedDiscovery({"a": first, "b": second}).watch())
    await until(watching, *members(EngineRole.PREFILL))
    second.tell(*members(EngineRole.DECODE), C)
    await until(watching, *members(EngineRole.PREFILL), C)
    assert [m[:11] for m in caplog.messages] == ["5000 engine"]
    assert caplog.messages[0].endswith("http://e0000:1, http://e0001:1, http://e0002:1, …")


async def test_a_source_that_fails_keeps_its_engines_and_is_watched_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    failing, other, pause = Told(A), Told(B), Pause()
    merged = MergedDiscovery({"failing": failing, "other": other}, sleep=pause)
    watching = aiter(merged.watch())
    await until(watching, A, B)
    failing.changes.put_nowait(OSError("the disk is gone"))
    await pause.began.wait()
    other.tell(B, C)
    assert await anext(watching) == {A, B, C}
    trouble = "it failed (OSError: the disk is gone) and is tried again"
    assert merged.sources()[0] == Source("failing", 1, trouble)
    failing.changes.put_nowait(OSError("the disk is gone"))
    pause.over.set()
    failing.tell(A)
    failing.tell()
    assert await anext(watching) == {B, C}
    assert failing.watched == 3
    assert merged.sources()[0] == Source("failing", 0, None)
    assert caplog.messages == [
        f"the source of engines 'failing': {trouble}",
        "the source of engines 'failing' works again",
    ]


async def test_who_stops_watching_stops_the_sources() -> None:
    first, second = Told(A), Told(B)
    watching = MergedDiscovery({"first": first, "second": second}).watch()
    await until(watching, A, B)

    async def watch_on() -> None:
        async for _ in watching:
            pass

    task = asyncio.create_task(watch_on())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (first.left, second.left) == (1, 1)


async def test_who_watches_again_loses_no_engine() -> None:
    first, second = Told(A), Told(B)
    merged = MergedDiscovery({"first": first, "second": second})
    await until(merged.watch(), A, B)
    first.tell(A, C)
    assert await anext(aiter(merged.watch())) >= {A, B}


async def told(config: RouterConfig) -> frozenset[Member]:
    return await anext(aiter(discovery(config).watch()))


async def test_engines_of_the_command_line_have_their_flags_role_labels_and_kv_events() -> None:
    config = RouterConfig(
        prefill=("http://10.0.0.1:8081,zone=a",),
        decode=("http://10.0.0.2:8081,kv-events=tcp://*:9999",),
        engine=("http://[fd00::3]:8081",),
        kv_events="tcp://*:5557",
        kv_replay="tcp://*:6557",
        kv_ranks=2,
    )
    assert await told(config) == {
        Member(
            "http://10.0.0.1:8081",
            EngineRole.PREFILL,
            labels=(("zone", "a"),),
            kv_events=Subscription("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", 2),
        ),
        Member("http://10.0.0.2:8081", EngineRole.DECODE, kv_events=Subscription("tcp://10.0.0.2:9999")),
        Member(
            "http://[fd00::3]:8081",
            EngineRole.BOTH,
            kv_events=Subscription("tcp://[fd00::3]:5557", "tcp://[fd00::3]:6557", 2),
        ),
    }


async def test_engines_of_a_file_join_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("engines: [{url: http://10.0.0.9:8081, role: prefill}]")
    config = RouterConfig(decode=("http://10.0.0.2:8081",), discover_file=str(path), kv_events="tcp://*:5557")
    expected = {
        Member("http://10.0.0.2:8081", EngineRole.DECODE, kv_events=Subscription("tcp://10.0.0.2:5557")),
        Member("http://10.0.0.9:8081", EngineRole.PREFILL, kv_events=Subscription("tcp://10.0.0.9:5557")),
    }
    await until(discovery(config).watch(), *expected)


def test_each_source_has_a_name() -> None:
    config = RouterConfig(
        engine=("http://10.0.0.2:8081",),
        discover_file="/etc/engines.yaml",
        discover_dns=("prefill=prefill.test:8081", "both=_http._tcp.all.test"),
    )
    assert [source.name for source in discovery(config).sources()] == [
        "command line",
        "file /etc/engines.yaml",
        "DNS prefill=prefill.test:8081",
        "DNS both=_http._tcp.all.test",
    ]
    only = RouterConfig(discover_file="/etc/engines.yaml")
    assert [source.name for source in discovery(only).sources()] == ["file /etc/engines.yaml"]


def test_a_name_that_cannot_be_one_is_told_with_its_flag() -> None:
    with pytest.raises(ValueError, match=r"--discover-dns: 10\.0\.0\.7 is an address and no name"):
        discovery(RouterConfig(discover_dns=("prefill=10.0.0.7:8081",)))
