"""Engines that a file lists: what may stand there, how it may change, and what a bad one comes to."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import Subscription
from tandem.router.discovery import FileDiscovery, Member
from tandem.router.discovery.engine_list import ENGINES_LIMIT, BadList, read_engines
from tandem.router.discovery.file import SIZE_LIMIT
from tandem.router.engines import EngineRole

from .discovery_fakes import Followed, Time, following

ONE = "engines: [{url: http://10.0.0.1:8081, role: prefill}]"
TWO = """
engines:
  - url: http://10.0.0.1:8081
    role: prefill
  - url: http://10.0.0.2:8082
    role: decode
"""
URL_1, URL_2 = "http://10.0.0.1:8081", "http://10.0.0.2:8082"


def nothing_said(host: str) -> None:
    return None


def write(path: Path, text: str | bytes) -> None:
    """Replace a file in one step."""
    beside = path.with_suffix(".new")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    beside.replace(path)


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[FileDiscovery, Followed]]:
    time = Time()
    source = FileDiscovery(str(path), sleep=time.sleep)
    async with following(source, time) as followed:
        await followed.after(0.1)  # a second look: nobody is writing
        yield source, followed


async def next_look(followed: Followed) -> None:
    await followed.after(1.0)
    await followed.after(0.1)


def test_an_engine_has_a_url_a_role_labels_and_kv_events() -> None:
    text = """
    engines:
      - url: http://10.0.0.7:8081
        role: prefill
        labels: {zone: a, tp: 2, fast: yes}   # values are text, quoted or not
        kvEvents: {endpoint: "tcp://*:5557", replay: "tcp://*:6557", ranks: 2}
      - url: http://[FD00::1]:08082/
        role: both
    """
    assert read_engines(text, nothing_said) == {
        Member(
            "http://10.0.0.7:8081",
            EngineRole.PREFILL,
            labels=(("fast", "yes"), ("tp", "2"), ("zone", "a")),
            kv_events=Subscription("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557", 2),
        ),
        Member("http://[fd00::1]:8082", EngineRole.BOTH),
    }


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_will_do(indent: int | str | None) -> None:
    engine = {"url": URL_1, "role": "decode", "labels": {"tp": 2, "name": "é \\ /"}}
    text = json.dumps({"engines": [engine]}, indent=indent).replace("/", "\\/")
    assert read_engines(text, nothing_said) == {
        Member(URL_1, EngineRole.DECODE, labels=(("name", "é \\ /"), ("tp", "2")))
    }


def test_an_engine_without_kv_events_has_those_that_hold_for_all() -> None:
    def for_all(host: str) -> Subscription:
        return Subscription("tcp://*:5557").at(host)

    text = TWO + "    kvEvents: {endpoint: tcp://10.9.9.9:5}"
    events = {m.url: m.kv_events for m in read_engines(text, for_all)}
    assert events == {URL_1: Subscription("tcp://10.0.0.1:5557"), URL_2: Subscription("tcp://10.9.9.9:5")}


BAD = {
    "engines: [}": "line 1, column 11: not YAML or JSON",
    "engines: []\n---\nengines: []": "line 2, column 1: not YAML or JSON",
    "engines: \x07": "not YAML or JSON: unacceptable character",
    "": "it is empty; a list without engines is written `engines: []`",
    "# engines to come": "it is empty",
    "[]": "line 1: the file: must be a mapping",
    "engines:": "line 1: engines: must be a list; for none, write []",
    "{}": "line 1: the file: engines is missing",
    "engine: []": "line 1: engine: is not known; did you mean engines?",
    "engines: []\nengines: []": "line 2: the file: 'engines' is given twice",
    "engines:\n- http://10.0.0.1:8081": "line 2: engines[0]: must be a mapping",
    TWO + "    rôle: decode": "line 7: engines[1].rôle: is not known; did you mean role?",
    TWO + "    weight: 1": "line 7: engines[1].weight: is not known; known are url, role, labels, kvEvents",
    TWO + "    role: prefill": "line 7: engines[1]: 'role' is given twice",
    "engines:\n- role: decode": "line 2: engines[0]: url is missing",
    f"engines:\n- url: {URL_1}": "line 2: engines[0]: role is missing",
    ONE.replace("http:", "https:"): "line 1: engines[0].url: 'https://10.0.0.1:8081' is not an http:// URL",
    ONE.replace(":8081", ""): "engines[0].url: 'http://10.0.0.1' needs a host and a port",
    ONE.replace("8081", "808100"): "engines[0].url: ",
    ONE.replace("10.0.0.1", "@10.0.0.1"): "must be a bare origin",
    ONE.replace("http://10.0.0.1:8081", "[1]"): "engines[0].url: must be text",
    ONE.replace("prefill", "prefil"): (
        "engines[0].role: 'prefil' is not one of prefill, decode, both; did you mean prefill?"
    ),
    ONE.replace("prefill", "{a: b}"): "engines[0].role: must be text",
    TWO + f"  - {{url: {URL_1}/, role: decode}}": (
        f"line 7: engines[2].url: {URL_1} is that of engines[0] already"
    ),
    TWO + "    labels: [a]": "line 7: engines[1].labels: must be a mapping",
    TWO + "    labels: {zone: [a]}": "line 7: engines[1].labels.zone: must be text",
    TWO + "    labels:\n      a b: c": "line 8: engines[1].labels: 'a b' is not a label's name",
    TWO + "    kvEvents: tcp://*:1": "line 7: engines[1].kvEvents: must be a mapping",
    TWO + "    kvEvents: {}": "line 7: engines[1].kvEvents: endpoint is missing",
    TWO + "    kvEvents: {endpoint: '*:1'}": "line 7: engines[1].kvEvents: '*:1' is not tcp://HOST:PORT",
    TWO + "    kvEvents: {endpoint: 'tcp://*:1', ranks: two}": (
        "line 7: engines[1].kvEvents.ranks: 'two' is not a whole number"
    ),
    TWO + "    kvEvents: {endpoint: 'tcp://*:1', ranks: 0}": "line 7: engines[1].kvEvents: 0 ranks",
    TWO.replace("    role: prefill", "    role: prefill\n    kvEvents: {endpoint: 'tcp://h:1', ranks: 2}")
    + "    kvEvents: {endpoint: 'tcp://h:2'}": (
        "line 6: engines[1].kvEvents: its KV events would be followed at tcp://h:2, as those of engines[0]"
    ),
    TWO + "    kvEvents: {endpont: 'tcp://*:1'}": "did you mean endpoint?",
    "&a [*a]": "line 1: the file: must be a mapping",
    "[" * 100_000: "not YAML or JSON",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40])
def test_a_bad_list_says_where_and_what(text: str) -> None:
    with pytest.raises(BadList) as caught:
        read_engines(text, nothing_said)
    assert BAD[text] in str(caught.value)


def test_several_mistakes_are_told_at_once_and_not_all_of_a_thousand() -> None:
    text = "engines:\n" + f"- {{url: {URL_1}, role: x}}\n" * 1000
    with pytest.raises(BadList, match=r"line 2: engines\[0\].*line 6: engines\[4\].*995 more") as caught:
        read_engines(text, nothing_said)
    assert len(str(caught.value)) < 1000


def test_a_list_has_ten_thousand_engines_at_most() -> None:
    def listed(number: int) -> str:
        urls = (f"http://10.0.{n >> 8}.{n & 255}:1" for n in range(number))
        return "engines:\n" + "".join(f"- {{url: {url}, role: both}}\n" for url in urls)

    assert len(read_engines(listed(ENGINES_LIMIT), nothing_said)) == ENGINES_LIMIT
    with pytest.raises(BadList, match=r"engines: 10,001 are more than 10,000"):
        read_engines(listed(ENGINES_LIMIT + 1), nothing_said)


@given(st.text() | st.text(alphabet="engiurlo:htp/{}[]&*!,-\n '\"1"), st.integers(0, len(TWO)))
def test_whatever_stands_there_is_a_list_or_a_bad_list(text: str, at: int) -> None:
    for whole in (text, TWO[:at] + text + TWO[at:]):
        with suppress(BadList):
            read_engines(whole, nothing_said)


async def test_engines_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ONE)
    async with watched(path) as (source, followed):
        assert followed.urls == {URL_1}
        write(path, TWO)
        await next_look(followed)
        assert followed.urls == {URL_1, URL_2}
        write(path, TWO + "# the same engines\n")
        await next_look(followed)
        assert len(followed.told) == 2  # nothing new to tell
        assert source.trouble is None


async def test_a_config_map_is_followed_through_its_links(tmp_path: Path) -> None:
    """Kubernetes swaps the link `..data` between folders; the file's own link stays as it is."""
    for name, text in (("first", ONE), ("second", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engines.yaml").write_text(text)
        os.utime(tmp_path / name / "engines.yaml", (0, 0))  # no time of change tells them apart
    data, path = tmp_path / "..data", tmp_path / "engines.yaml"
    data.symlink_to("first")
    path.symlink_to("..data/engines.yaml")
    async with watched(path) as (_, followed):
        assert followed.urls == {URL_1}
        (tmp_path / "..new").symlink_to("second")
        (tmp_path / "..new").replace(data)
        await next_look(followed)
        assert followed.urls == {URL_1, URL_2}


async def test_a_file_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(TWO)
    async with watched(path) as (source, followed):
        path.write_text(ONE[:20])
        await followed.after(1.0)
        path.write_text(TWO.partition("  - url: http://10.0.0.2")[0])  # a list by itself
        await followed.after(0.1)
        path.write_text(TWO + "    labels: {zone: a}")
        await followed.after(0.1)
        assert (len(followed.told), source.trouble) == (1, None)
        await followed.after(0.1)
        assert {m.labels for m in followed.told[-1]} == {(), (("zone", "a"),)}


async def test_a_bad_file_leaves_the_engines_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.yaml"
    write(path, TWO)
    async with watched(path) as (source, followed):
        write(path, "engines: [{url: 10.0.0.1:8081, role: prefill}]")
        for _ in range(3):
            await next_look(followed)
        assert len(followed.told) == 1
        assert source.trouble is not None
        assert "line 1: engines[0].url: '10.0.0.1:8081' is not an http:// URL" in source.trouble
        assert "Correct it; until then the 2 that it listed before stay" in source.trouble
        (record,) = caplog.records
        assert (record.levelname, record.getMessage()) == (
            "WARNING",
            f"engines of the file {path}: {source.trouble}",
        )
        write(path, "engines: 7")  # bad in another way: said too
        await next_look(followed)
        assert len(caplog.records) == 2
        write(path, ONE)
        await next_look(followed)
        assert source.trouble is None
        assert followed.urls == {URL_1}


async def test_a_router_may_start_before_its_file_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.yaml"
    async with watched(path) as (source, followed):
        assert followed.told == [frozenset()]
        assert source.trouble == "it does not exist. Create it; until then there are none from it"
        assert len(caplog.records) == 1
        write(path, "engines: [")
        await next_look(followed)
        assert "not YAML or JSON" in (source.trouble or "")
        write(path, ONE)
        await next_look(followed)
        assert followed.urls == {URL_1}
        assert source.trouble is None


async def test_a_file_that_goes_away_takes_no_engine_along(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ONE)
    async with watched(path) as (source, followed):
        path.unlink()
        await next_look(followed)
        assert source.trouble == "it does not exist. Create it; until then the 1 that it listed before stay"
        path.mkdir()
        await next_look(followed)
        assert "not a regular file" in (source.trouble or "")
        path.rmdir()
        os.mkfifo(path)  # which nobody writes to: reading it would take for ever
        await next_look(followed)
        assert "not a regular file" in (source.trouble or "")
        assert len(followed.told) == 1


async def test_a_list_without_engines_takes_all_away_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ONE)
    async with watched(path) as (source, followed):
        write(path, "engines: []")
        await next_look(followed)
        assert followed.urls == set()
        assert source.trouble is None
        assert "lists no engines: all leave" in caplog.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"#" * (SIZE_LIMIT + 1), "more than 1,048,576 bytes"),
        (b"engines: []\n#\xff", "byte 14 is not UTF-8"),
    ],
)
async def test_what_is_no_text_of_a_sensible_size_is_bad(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "engines.yaml"
    write(path, content)
    async with watched(path) as (source, followed):
        assert followed.told == [frozenset()]
        assert told in (source.trouble or "")


async def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    write(path, b"\xef\xbb\xbf" + ONE.encode())
    async with watched(path) as (_, followed):
        assert followed.urls == {URL_1}


async def test_a_file_is_watched_again_with_what_it_listed(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ONE)
    async with watched(path) as (source, followed):
        path.unlink()
        await followed.stop()
        await followed.start(source)
        await followed.after(0.1)
        assert len(followed.told) == 2
        assert followed.urls == {URL_1}
