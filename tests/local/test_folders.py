"""Places to write to: found out by writing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tandem.local import folders
from tandem.local.folders import room_problem, write_problem


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert write_problem(folder, "logs") is None
    assert list(folder.iterdir()) == []


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert str(write_problem(folder, "logs")).startswith(f"Cannot write logs into {folder}: ")


def test_a_file_system_that_takes_nothing_is_told() -> None:
    """There is one on every Linux, and root may not write there either."""
    assert str(write_problem(Path("/proc/tandem"), "logs")).startswith(
        "Cannot write logs into /proc/tandem: "
    )


def test_room_is_what_the_folders_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert room_problem(tmp_path, free // 2, "the model") is None
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda folder: usage)
    assert str(room_problem(tmp_path, 3_000_000, "the model")) == (
        f"There is no room for the model in {tmp_path}: it takes 3 MB, and the disk has 1 MB left. "
        "Make room or mend its rights, or set TANDEM_HOME to a folder elsewhere."
    )
