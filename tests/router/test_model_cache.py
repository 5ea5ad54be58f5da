"""The folder of fetched model files: whole or not there, each content once, nothing kept for ever."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tandem.router.model_cache import Manifest, ModelCache


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(str(tmp_path / "cache"))


def everything(cache: ModelCache) -> set[str]:
    return {str(path.relative_to(cache.folder)) for path in cache.folder.rglob("*") if path.is_file()}


def test_a_model_has_its_files_under_their_names_and_marks_without_content(cache: ModelCache) -> None:
    files = {"config.json": cache.keep(b"{}"), "additional_chat_templates/tool_use.jinja": cache.keep(b"t")}
    model = cache.model(Manifest(files, frozenset({"tekken.json"})))
    assert (model / "config.json").read_bytes() == b"{}"
    assert (model / "additional_chat_templates/tool_use.jinja").read_bytes() == b"t"
    assert (model / "tekken.json").read_bytes() == b""
    assert cache.model(Manifest(files, frozenset({"tekken.json"}))) == model


def test_equal_content_is_kept_once_under_its_hash(cache: ModelCache) -> None:
    digest = hashlib.sha256(b"a").hexdigest()
    assert cache.keep(b"a") == cache.keep(b"a") == digest
    assert everything(cache) == {f"contents/{digest}"}
    assert cache.has(digest)
    assert not cache.has(hashlib.sha256(b"b").hexdigest())


def test_manifests_are_equal_by_what_they_hold() -> None:
    one = Manifest({"a": "1", "b": "2"}, frozenset({"m", "n"}))
    assert one.digest == Manifest({"b": "2", "a": "1"}, frozenset({"n", "m"})).digest
    others = [
        Manifest({"a": "1", "b": "2"}, frozenset({"m"})),
        Manifest({"a": "2", "b": "1"}, frozenset({"m", "n"})),
        Manifest({"a": "1"}, frozenset({"m", "n"})),
        Manifest({"a": "1", "b": "2", "m": "3"}, frozenset({"n"})),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5


def test_what_nobody_serves_any_more_is_removed(cache: ModelCache) -> None:
    shared, old, new = cache.keep(b"shared"), cache.keep(b"old"), cache.keep(b"new")
    before, after = Manifest({"a": shared, "b": old}), Manifest({"a": shared, "b": new})
    gone, kept = cache.model(before), cache.model(after)
    cache.prune([after])
    assert not gone.exists()
    assert everything(cache) == {f"contents/{shared}", f"contents/{new}"} | {
        str((kept / name).relative_to(cache.folder)) for name in "ab"
    }


def test_what_was_not_finished_is_never_seen(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="no space"):
            cache.keep(b"a")
    assert not cache.has(hashlib.sha256(b"a").hexdigest())
    again = ModelCache(str(cache.folder))
    assert everything(again) == set(), "the next router cleans up"
    again.model(Manifest({"a": again.keep(b"a")}))


def test_a_folder_that_was_given_stays_and_is_found_again(cache: ModelCache) -> None:
    kept = cache.keep(b"a")
    cache.close()
    assert ModelCache(str(cache.folder)).has(kept)


def test_a_folder_of_its_own_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = ModelCache(None)
    cache.keep(b"a")
    assert list(tmp_path.iterdir()) == [cache.folder]
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    cache.close()
    assert list(tmp_path.iterdir()) == []
