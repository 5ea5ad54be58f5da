"""Files of API keys: what may stand there, how they may change, and what a bad one comes to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tandem.router.errors import Unauthorized
from tandem.router.keys import ApiKey, KeyFile, Limits, digest, entry, new_key, new_salt, read_keys
from tandem.router.keys.key_list import KEYS_LIMIT, SIZE_LIMIT
from tandem.router.listing import BadList

from .discovery_fakes import Time
from .key_fakes import A, B, hashed, listed, replace

H = hashed(A)
ONE = f"keys:\n- name: a\n  sha256: {H}\n"


def test_a_key_has_a_name_a_hash_limits_a_salt_and_models() -> None:
    text = f"""
    keys:
      - name: team-a
        sha256: {H.upper()}
        requestsPerSecond: 2.5
        burst: 10
        tokensPerMinute: 100000
        concurrentRequests: 8
        cacheSalt: a salt
        models: [m, "org.model"]
      - {{name: B.1_2, sha256: "{hashed(B)}", requestsPerSecond: 2.5}}
    """
    assert read_keys(text.encode()) == (
        ApiKey(
            "team-a", digest(A.encode()), Limits(2.5, 10, 100_000, 8), "a salt", frozenset({"m", "org.model"})
        ),
        ApiKey("B.1_2", digest(B.encode()), Limits(2.5, 3)),
    )


def test_json_will_do() -> None:
    text = json.dumps({"keys": [{"name": "a", "sha256": H, "burst": 1, "requestsPerSecond": 1}]})
    assert read_keys(text.encode())[0].limits == Limits(1.0, 1)


@given(st.text(alphabet="abcXYZ019._-", min_size=1, max_size=20).map("k".__add__), st.booleans())
def test_what_is_made_can_be_read(name: str, own: bool) -> None:
    key = ApiKey(name, digest(new_key().encode()), cache_salt=new_salt() if own else None)
    assert read_keys(json.dumps({"keys": [entry(key)]}).encode()) == (key,)


BAD = {
    "": "it is empty; a list without keys is written `keys: []`",
    "[]": "line 1: the file: must be a mapping, as in `keys: []`",
    "key: []": "line 1: key: is not known; did you mean keys?",
    "keys:": "line 1: keys: must be a list; for none, write []",
    "keys: [}": "line 1, column 8: not YAML or JSON",
    "keys: [a]": "line 1: keys[0]: must be a mapping",
    "keys:\n- name: a": "line 2: keys[0]: sha256 is missing",
    f"keys:\n- sha256: {H}": "line 2: keys[0]: name is missing",
    ONE + "  cache_salt: x": "line 4: keys[0].cache_salt: is not known; did you mean cacheSalt?",
    ONE + "  name: b": "line 4: keys[0]: 'name' is given twice",
    ONE + ONE.removeprefix("keys:\n"): "line 4: keys[1].name: a is that of keys[0] already",
    ONE + f"- name: b\n  sha256: {H.upper()}": "line 4: keys[1].sha256: is that of keys[0] already",
    ONE.replace("name: a", "name: a b"): "line 2: keys[0].name: is not 1 to 63 letters",
    ONE.replace("name: a", "name: -a"): "line 2: keys[0].name: is not 1 to 63 letters",
    ONE.replace("name: a", "name: " + "a" * 64): "line 2: keys[0].name: is not 1 to 63 letters",
    ONE.replace("name: a", "name: é"): "line 2: keys[0].name: is not 1 to 63 letters",
    ONE.replace("name: a", "name: sk-a"): "line 2: keys[0].name: begins as keys do",
    ONE.replace(H, "[]"): "line 3: keys[0].sha256: must be text",
    ONE.replace(H, A): "line 3: keys[0].sha256: is not the 64 hexadecimal digits of a SHA-256. The hash",
    ONE.replace(H, H[:-1]): "line 3: keys[0].sha256: is not the 64 hexadecimal digits",
    ONE.replace(H, f"{H}0"): "line 3: keys[0].sha256: is not the 64 hexadecimal digits",
    ONE + "  requestsPerSecond: fast": (
        "line 4: keys[0].requestsPerSecond: 'fast' is not a number from 0.001 to 1,000,000, as 0.5 or 20"
    ),
    ONE + "  requestsPerSecond: 0": "line 4: keys[0].requestsPerSecond: '0' is not a number from",
    ONE + "  requestsPerSecond: -1": "line 4: keys[0].requestsPerSecond: '-1' is not a number from",
    ONE + "  requestsPerSecond: nan": "line 4: keys[0].requestsPerSecond: 'nan' is not a number from",
    ONE + "  requestsPerSecond: 1e3": "line 4: keys[0].requestsPerSecond: '1e3' is not a number from",
    ONE + "  requestsPerSecond: 1000001": "line 4: keys[0].requestsPerSecond: '1000001' is not a number",
    ONE + "  burst: 3": "line 4: keys[0].burst: goes with requestsPerSecond, which is missing",
    ONE + "  requestsPerSecond: 1\n  burst: 0": "line 5: keys[0].burst: '0' is not a whole number from 1 to",
    ONE + "  tokensPerMinute: 1.5": "line 4: keys[0].tokensPerMinute: '1.5' is not a whole number from 1 to",
    ONE + "  tokensPerMinute: ²": "line 4: keys[0].tokensPerMinute: '²' is not a whole number from 1 to",
    ONE + "  concurrentRequests: 0": "line 4: keys[0].concurrentRequests: '0' is not a whole number from 1",
    ONE
    + "  concurrentRequests: "
    + "9" * 99: "line 4: keys[0].concurrentRequests: '99999999999999999999' is",
    ONE + "  cacheSalt: ''": "line 4: keys[0].cacheSalt: is not 1 to 128 printable characters",
    ONE + "  cacheSalt: a@b": "line 4: keys[0].cacheSalt: is not 1 to 128 printable characters without '@'",
    ONE + "  cacheSalt: " + "x" * 129: "line 4: keys[0].cacheSalt: is not 1 to 128 printable characters",
    ONE + '  cacheSalt: "a\\nb"': "line 4: keys[0].cacheSalt: is not 1 to 128 printable characters",
    ONE + "  models: m": "line 4: keys[0].models: must be a list",
    ONE + "  models: []": "line 4: keys[0].models: names no model; leave it out where all may be used",
    ONE + "  models: ['']": "line 4: keys[0].models: the name of a model has 1 to 256 characters",
    ONE + "  models: [{}]": "line 4: keys[0].models[0]: must be text",
    ONE + f"  models: {list(range(101))}": "line 4: keys[0].models: 101 are more than 100",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:60])
def test_a_bad_file_says_where_and_what(text: str) -> None:
    with pytest.raises(BadList) as caught:
        read_keys(text.encode())
    assert BAD[text] in str(caught.value)


@pytest.mark.parametrize("field", ["name", "sha256", "cacheSalt"])
def test_a_key_or_a_salt_in_the_wrong_place_is_not_repeated(field: str) -> None:
    fields = {"name": "a", "sha256": H, "cacheSalt": "s", field: "sk-tandem-secret@"}
    with pytest.raises(BadList) as caught:
        read_keys(json.dumps({"keys": [fields]}).encode())
    assert f"keys[0].{field}: " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_neither_hashes_nor_salts_are_shown() -> None:
    key = ApiKey("a", digest(A.encode()), cache_salt="pepper")
    assert "pepper" not in repr(key)
    assert repr(key.digest) not in repr(key)


def test_several_mistakes_are_told_at_once_and_not_all_of_a_thousand() -> None:
    with pytest.raises(BadList, match=r"line 2: keys\[0\].*line 6: keys\[4\].*995 more") as caught:
        read_keys(b"keys:\n" + b"- {name: a, sha256: x}\n" * 1000)
    assert len(str(caught.value)) < 1500


def test_a_file_has_a_thousand_keys_at_most() -> None:
    def of(number: int) -> bytes:
        lines = (f"- {{name: k{n}, sha256: {hashed(str(n))}}}\n" for n in range(number))
        return ("keys:\n" + "".join(lines)).encode()

    assert len(read_keys(of(KEYS_LIMIT))) == KEYS_LIMIT
    with pytest.raises(BadList, match="keys: 1,001 are more than 1,000"):
        read_keys(of(KEYS_LIMIT + 1))


@given(st.binary() | st.text().map(str.encode), st.integers(0, len(ONE)))
def test_whatever_stands_there_is_a_list_or_a_bad_one(content: bytes, at: int) -> None:
    for whole in (content, ONE[:at].encode() + content + ONE[at:].encode()):
        with suppress(BadList):
            read_keys(whole)


class Watched:
    """A file of keys that is followed, and time for it to be looked at."""

    def __init__(self, path: Path) -> None:
        self._time = Time()
        self.file = KeyFile(str(path), sleep=self._time.sleep)
        registry = CollectorRegistry()
        registry.register(self.file)
        self._value = registry.get_sample_value

    async def after(self, *seconds: float) -> None:
        for each in seconds:
            await self._time.asleep.wait()
            self._time.advance(each)
        await self._time.asleep.wait()

    async def next_look(self) -> None:
        await self.after(1.0, 0.1)

    def knows(self, key: str) -> bool:
        try:
            self.file.store.caller(f"Bearer {key}".encode())
        except Unauthorized:
            return False
        return True

    @property
    def metrics(self) -> tuple[float | None, float | None]:
        """Keys known, and whether the file is bad."""
        return self._value("tandem_api_keys"), self._value("tandem_api_keys_stale")


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[Watched]:
    made = Watched(path)
    task = asyncio.create_task(made.file.follow())
    await made.after(0.1)
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_keys_follow_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tandem.router")
    path = tmp_path / "keys.yaml"
    replace(path, listed(a={}))
    async with watched(path) as w:
        assert (w.knows(A), w.knows(B), w.metrics) == (True, False, (1, 0))
        replace(path, listed(a={}, b={}))
        await w.next_look()
        assert (w.knows(A), w.knows(B), w.metrics) == (True, True, (2, 0))
        replace(path, listed(b={}))
        await w.next_look()
        assert (w.knows(A), w.knows(B), w.metrics) == (False, True, (1, 0))
    assert [r.getMessage() for r in caplog.records] == [
        f"API keys of the file {path}: {n}" for n in (1, 2, 1)
    ]


async def test_a_bad_file_leaves_the_keys_and_says_so_in_log_and_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    replace(path, listed(a={}))
    async with watched(path) as w:
        replace(path, listed(a={}, b={"burst": 1}))
        for _ in range(3):
            await w.next_look()
        assert (w.knows(A), w.knows(B), w.metrics) == (True, False, (1, 1))
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage() == (
            f"API keys of the file {path}: line 4: keys[1].burst: goes with requestsPerSecond, which is "
            "missing. Correct it; until then the 1 that it listed before stay"
        )
        path.unlink()
        await w.next_look()
        assert w.file.trouble == "it does not exist. Create it; until then the 1 that it listed before stay"
        replace(path, b"#" * (SIZE_LIMIT + 1))
        await w.next_look()
        assert "it has more than 1,048,576 bytes" in (w.file.trouble or "")
        replace(path, listed(a={}))  # what it was before
        await w.next_look()
        assert (w.knows(A), w.metrics) == (True, (1, 0))
        replace(path, listed(b={}))
        await w.next_look()
        assert (w.knows(A), w.knows(B)) == (False, True)


async def test_a_file_without_keys_lets_nobody_in_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    replace(path, listed(a={}))
    async with watched(path) as w:
        replace(path, "keys: []")
        await w.next_look()
        assert (w.knows(A), w.metrics) == (False, (0, 0))
        assert "it lists none, so every request is refused" in caplog.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "it does not exist. Create it"),
        (b"\xff", "byte 1 is not UTF-8"),
        (b"#" * (SIZE_LIMIT + 1), "it has more than 1,048,576 bytes"),
        (b"keys: 7", "line 1: keys: must be a list"),
    ],
)
def test_a_router_does_not_start_without_its_keys(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="--api-keys-file") as caught:
        KeyFile(str(path))
    assert f"{path}: {told}" in str(caught.value)
