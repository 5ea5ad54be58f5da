"""Sockets of a local endpoint: short enough, for their owner only, without what a killed run left."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from tandem.local.errors import LocalError
from tandem.local.sockets import event_sockets, make_private, socket_folder


def test_each_endpoint_and_each_engine_has_sockets_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    first, second = socket_folder(8100), socket_folder(8102)
    assert first != second
    engines = [event_sockets(first, 8100), event_sockets(first, 8101), event_sockets(second, 8102)]
    paths = {text for e in engines for text in (e.events, e.replay)}
    assert len(paths) == 6
    assert all(str(text).startswith("ipc:///tmp/") for text in paths)


def folder_for_paths_of(length: int) -> Path:
    return Path("/" + "x" * (length - len("/") - len("/8100.replay")))


def test_the_longest_path_of_a_socket_is_taken() -> None:
    where = event_sockets(folder_for_paths_of(107), 8100)
    assert where.replay is not None
    path = where.replay.removeprefix("ipc://")
    assert len(path) == 107
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(FileNotFoundError):
        one.bind(path)  # not "path too long"


def test_a_longer_one_is_told_with_the_way_out() -> None:
    with pytest.raises(LocalError, match=r"107 bytes\. Set TMPDIR to a shorter folder"):
        event_sockets(folder_for_paths_of(108), 8100)


@pytest.mark.parametrize("name", ["a,b", "a\nb", "a\udc80b"])
def test_a_folder_that_flags_cannot_name_is_refused(name: str) -> None:
    with pytest.raises(LocalError, match="TMPDIR"):
        event_sockets(Path("/tmp") / name, 8100)


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    make_private(folder)
    (folder / "8100.events").touch()
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o704])
def test_a_folder_that_others_can_enter_is_refused_and_left_alone(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    folder.chmod(mode)
    (folder / "theirs").touch()
    with pytest.raises(LocalError, match="is not a folder of this user alone"):
        make_private(folder)
    assert (folder / "theirs").exists()


def test_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "kept").touch()
    (tmp_path / "sockets").symlink_to(elsewhere)
    with pytest.raises(LocalError, match="is not a folder of this user alone"):
        make_private(tmp_path / "sockets")
    assert (elsewhere / "kept").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match=r"Cannot make .*file/sockets, for sockets: Not a directory"):
        make_private(tmp_path / "file" / "sockets")
