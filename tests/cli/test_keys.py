"""`tandem keys`: what it makes is what a router takes, and what is wrong in a file is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tandem.router.keys import KeyStore, keys_of

from .conftest import Tandem


@pytest.mark.parametrize("flags", [(), ("--shared-cache",)])
def test_a_new_key_is_known_by_the_entry_that_is_printed_beside_it(
    tandem_command: Tandem, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    printed, files = [], []
    for name in ("team-a", "team-b"):
        done = tandem_command("keys", "new", name, *flags)
        assert (done.code, done.err) == (0, "")
        before, entry = done.out.split("`keys:`:\n\n")
        printed.append(next(line for line in before.splitlines() if line.startswith("sk-tandem-")))
        files.append(entry)
    assert printed[0] not in files[0]
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + "".join(files))
    keys = keys_of(str(path))
    store = KeyStore(keys)
    assert [store.caller(f"Bearer {key}".encode()).name for key in printed] == ["team-a", "team-b"]
    salts = {key.cache_salt for key in keys}
    assert salts == {None} if flags else len(salts - {None}) == 2
    done = tandem_command("keys", "check", str(path))
    assert (done.code, done.err) == (0, f"{path}: 2 keys\n")
    cache = "shared" if flags else "of its own"
    assert done.out == "".join(
        f"team-{name}: no limits; all models; cached KV {cache}\n" for name in ("a", "b")
    )


def test_it_prints_json_for_programs(tandem_command: Tandem, tmp_path: Path) -> None:
    made = json.loads(tandem_command("keys", "new", "a", "--json").out)
    limits = {
        "requestsPerSecond": 0.5,
        "burst": 3,
        "tokensPerMinute": 1000,
        "concurrentRequests": 2,
        "models": ["n", "m"],
    }
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [{**made["entry"], **limits}]}))
    assert KeyStore(keys_of(str(path))).caller(f"Bearer {made['key']}".encode()).name == "a"
    done = tandem_command("keys", "check", str(path), "--json")
    assert json.loads(done.out) == {"keys": [{"name": "a", **limits, "models": ["m", "n"], "ownCache": True}]}
    assert tandem_command("keys", "check", str(path)).out == (
        "a: 0.5 requests per second, 3 at once; 1,000 tokens per minute; 2 requests running; models m, n; "
        "cached KV of its own\n"
    )
    assert made["entry"]["cacheSalt"] not in done.out
    assert made["entry"]["sha256"] not in done.out


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 64, "sk-1", "a\n"])
def test_a_name_that_is_none_is_told(tandem_command: Tandem, name: str) -> None:
    done = tandem_command("keys", "new", name)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("tandem: NAME ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "it does not exist. Create it"),
        ("keys: [{name: a}]", "line 1: keys[0]: sha256 is missing"),
        ("", "it is empty; a list without keys is written `keys: []`"),
    ],
)
def test_a_bad_file_is_told_with_its_name(
    tandem_command: Tandem, tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_text(content)
    done = tandem_command("keys", "check", str(path))
    assert (done.code, done.out, done.err) == (1, "", f"tandem: {path}: {said}\n")


def test_a_file_that_lets_nobody_in_is_told(tandem_command: Tandem, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: []")
    done = tandem_command("keys", "check", str(path))
    assert (done.code, done.out) == (0, "")
    assert done.err == f"{path}: 0 keys: a router with this file refuses every request\n"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--api-keys-file", "keys[0]: sha256 is missing"),
        ("--engine-key-file", "it is not one word of printable ASCII"),
    ],
)
def test_a_router_does_not_start_with_a_bad_file(
    tandem_command: Tandem, tmp_path: Path, flag: str, said: str
) -> None:
    path = tmp_path / "file"
    path.write_text("keys: [{name: a}]")
    done = tandem_command("router", "--engine", "http://127.0.0.1:1", "--port", "0", flag, str(path))
    assert done.code == 3
    assert f"tandem: {flag}: {path}: " in done.err
    assert said in done.err
