"""`tandem logs`: what the processes of an endpoint have written, and go on to write."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tandem.cli import logs
from tandem.cli.logs import Tail

from .conftest import Tandem
from .local_endpoints import eventually, up, written


def with_logs(folder: Path) -> Path:
    for name in ("prefill-0", "decode-0", "router"):
        (folder / f"{name}.log").write_text("".join(f"{name} {i}\n" for i in range(150)))
    return folder


def test_the_last_lines_of_each_are_shown_with_its_name(tandem_command: Tandem) -> None:
    with up() as (folder, _):
        with_logs(folder)
        (folder / "up.log").write_text("ready after 9 s\n")
        done = tandem_command("logs", "-n", 2)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "up | ready after 9 s",
        *(f"{name} | {name} {i}" for name in ("prefill-0", "decode-0", "router") for i in (148, 149)),
    ]


def test_a_hundred_lines_are_shown_unless_told_otherwise(tandem_command: Tandem) -> None:
    with_logs(written()[0])
    assert tandem_command("logs", "small", "router").out.splitlines() == [
        f"router {i}" for i in range(50, 150)
    ]
    assert tandem_command("logs", "small", "router", "-n", 0).out == ""
    assert len(tandem_command("logs", "small", "router", "-n", 999).out.splitlines()) == 150


def test_one_word_may_name_a_process(tandem_command: Tandem) -> None:
    with_logs(written()[0])
    assert tandem_command("logs", "decode-0", "-n", 1).out == "decode-0 149\n"
    done = tandem_command("logs", "decode-1")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("tandem: No endpoint decode-1 has run on this machine. ")


def test_a_process_that_is_not_there_is_told_with_those_that_are(tandem_command: Tandem) -> None:
    written()
    done = tandem_command("logs", "small", "decode-7")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err
        == "tandem: small on port 8000 has no process decode-7; it has prefill-0, decode-0, router.\n"
    )


def test_the_one_that_runs_is_meant(tandem_command: Tandem) -> None:
    with_logs(written("small", 8001)[0])
    with up("small", 8000) as (folder, _):
        (folder / "router.log").write_text("no line's end")
        assert tandem_command("logs", "router").out == "no line's end\n"
    done = tandem_command("logs", "router")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err
        == "tandem: Several endpoints could be meant: small --port 8000; small --port 8001. Name one.\n"
    )
    assert len(tandem_command("logs", "router", "--port", 8001).out.splitlines()) == 100


@pytest.mark.parametrize("count", ["-1", "many", "10000000000000000000000"])
def test_a_number_of_lines_that_is_none_is_refused(tandem_command: Tandem, count: str) -> None:
    done = tandem_command("logs", f"--lines={count}")
    assert done.code == 2
    assert f"'{count}' is not a number of lines" in done.err


def test_following_one_that_has_ended_ends(tandem_command: Tandem) -> None:
    with_logs(written()[0])
    assert tandem_command("logs", "router", "-f", "-n", 1).out == "router 149\n"


def test_a_log_is_followed_when_it_is_emptied_or_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "router.log"
    tail = Tail("router", log)

    def new(*, final: bool = False) -> str:
        tail.show_new(final=final)
        return capsys.readouterr().out

    tail.show_last(9, final=False)
    assert new() == ""
    log.write_text("one\ntw")
    assert new() == "router | one\n"
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert new() == "router | two\nrouter | three\n"
    os.truncate(log, 0)
    assert new() == ""
    log.write_text("four\n")
    assert new() == "router | four\n"
    log.unlink()
    assert new() == ""
    (tmp_path / "new").write_text("five, a longer line than before\nsix")
    (tmp_path / "new").rename(log)
    assert new() == "router | five, a longer line than before\n"
    assert new(final=True) == "router | six\n"


def test_what_is_no_file_is_told_and_the_others_are_shown(tandem_command: Tandem) -> None:
    """Who opens a FIFO that nobody writes into waits for ever."""
    folder = with_logs(written()[0])
    for name in ("prefill-0", "decode-0"):
        (folder / f"{name}.log").unlink()
    os.mkfifo(folder / "prefill-0.log")
    (folder / "decode-0.log").mkdir()
    for follow in ((), ("-f",)):
        done = tandem_command("logs", "-n", 1, *follow)
        assert done.code == 3
        assert done.out == "router | router 149\n"
        assert done.err.splitlines() == [
            f"tandem: Cannot read {folder}/prefill-0.log: it is a FIFO and no file",
            f"tandem: Cannot read {folder}/decode-0.log: Is a directory",
        ]


def test_of_a_line_without_end_little_is_held_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "router.log"
    log.write_text("one\ntwo\nlong")
    os.truncate(log, 256 << 20)  # with a hole in it
    with log.open("a") as file:
        file.write("\nthree\n")
    tracemalloc.start()
    try:
        Tail("router", log).show_last(3, final=True)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    first, long, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("router | two", "router | three")
    assert long.startswith("router | long\0\0")
    assert long.endswith("\0 [the rest of this line is left out]")
    assert len(long) < 100_000


def test_a_line_without_end_is_cut_once_while_it_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "router.log"
    log.write_text("one\n")
    tail = Tail("", log)
    tail.show_last(9, final=False)
    assert capsys.readouterr().out == "one\n"
    shown = []
    for more in ("x" * 10, "x" * 100_000, "x" * 100_000, "x\ntw", "o\n"):
        with log.open("a") as file:
            file.write(more)
        tail.show_new(final=False)
        shown.append(capsys.readouterr().out)
    assert shown[0] == ""
    assert shown[1].endswith("x [the rest of this line is left out]\n")
    assert shown[2:] == ["", "", "two\n"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text", ["", "\n", "one", "one\n", "one\n\nthree\nfour", "\n\n\n", "one\ntwo\nthree\n"]
)
def test_the_last_lines_are_found_wherever_blocks_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, block: int
) -> None:
    monkeypatch.setattr(logs, "_BLOCK", block)
    log = tmp_path / "router.log"
    log.write_text(text)
    for count in range(5):
        Tail("", log).show_last(count, final=True)
        lines = text.splitlines()
        assert capsys.readouterr().out.splitlines() == lines[max(0, len(lines) - count) :]


def test_who_has_seen_enough_may_close_the_pipe() -> None:
    folder, _ = written()
    (folder / "router.log").write_text("line\n" * 100_000)
    command = [sys.executable, "-m", "tandem", "logs", "router", "-n", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_it_follows_until_the_endpoint_ends() -> None:
    command = [sys.executable, "-m", "tandem", "logs", "router", "-f"]
    with up() as (folder, _):
        log = folder / "router.log"
        log.write_text("one\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        with log.open("a") as file:
            file.write("two\nthr")
        assert process.stdout.readline() == "two\n"
        assert process.poll() is None
    with process.stdout:
        eventually(lambda: process.poll() is not None)
        assert process.stdout.read() == "thr\n"
    assert process.returncode == 0
