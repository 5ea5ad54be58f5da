"""What is known of endpoints from outside: what was written down, and whether they run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.local import paths, proc
from tandem.local.errors import LocalError
from tandem.local.record import EndpointState, find, hold, is_running, load, refuse_second, this_process


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def endpoint(name: str, port: int) -> EndpointState:
    pid, began = this_process()
    return EndpointState(
        name=name, url=f"http://127.0.0.1:{port}", port=port, pid=pid, pid_started=began, since=5.0
    )


def write(state: EndpointState) -> Path:
    folder = paths.state(state.name) / str(state.port)
    folder.mkdir(parents=True, exist_ok=True)
    state.save(folder)
    return folder


def test_what_is_written_down_is_read_back(home: Path) -> None:
    state = endpoint("a", 8000)
    folder = write(state)
    assert folder == home / "a" / "8000"
    assert load(folder) == state
    assert [p.name for p in folder.iterdir()] == ["state.json"]


NO_DATE = endpoint("a", 8000).model_copy(update={"since": 1e300}).model_dump_json().encode()


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"{}", b'{"name": 5}', b"[]", b"\0" * 512, b'{"name": "\xff"}', b"[" * 10_000, NO_DATE],
)
def test_what_cannot_be_read_is_no_endpoint(text: bytes) -> None:
    """As where the machine went down while it was written."""
    folder = write(endpoint("a", 8000))
    (folder / "state.json").write_bytes(text)
    assert load(folder) is None
    assert find() == []


def test_what_is_no_file_is_not_waited_for() -> None:
    folder = write(endpoint("a", 8000))
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")
    os.mkfifo(folder / ".state.json")
    os.mkfifo(folder / "lock")
    assert load(folder) is None
    assert not endpoint("a", 8000).save(folder)
    assert not is_running(folder)


def test_of_what_never_ends_no_more_is_read_than_there_can_be() -> None:
    folder = write(endpoint("a", 8000))
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/dev/zero")
    assert load(folder) is None


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    endpoint("a", 8000).save(tmp_path / "not there")


def test_endpoints_are_found_by_name_and_port() -> None:
    for name, port in (("a", 8000), ("a", 8001), ("b", 8000), ("[b]", 8000)):
        write(endpoint(name, port))

    def found(name: str | None = None, port: int | None = None) -> list[str]:
        return [f"{f.state.name} {f.state.port}" for f in find(name, port)]

    assert sorted(found()) == ["[b] 8000", "a 8000", "a 8001", "b 8000"]
    assert found("a") == ["a 8000", "a 8001"]
    assert found("a", 8001) == ["a 8001"]
    assert sorted(found(port=8000)) == ["[b] 8000", "a 8000", "b 8000"]
    assert found("[b]") == ["[b] 8000"]
    assert found("c") == found(port=9) == []
    assert found("") == found("*") == found("/tmp") == found("../home/a") == []


def test_one_runs_as_long_as_its_lock_is_held() -> None:
    folder = write(endpoint("a", 8000))
    assert not is_running(folder)
    with hold(folder):
        assert is_running(folder)
        (found,) = find()
        assert (found.running, found.phase, found.has_up) == (True, "starting", True)
    assert not is_running(folder)
    assert find()[0].phase == "ended"


def test_where_nothing_can_be_locked_that_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems of a network have no locks."""
    folder = write(endpoint("a", 8000))
    with hold(folder):
        pass

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    said = rf"^Nothing can be locked in {home}: No locks available\. Set TANDEM_HOME to a folder on a disk of"
    with pytest.raises(LocalError, match=said), hold(folder):
        pass
    with pytest.raises(LocalError, match=said):
        find()


def test_a_process_that_inherits_the_lock_holds_it_too() -> None:
    """As the reaper does: until it is done, something of the endpoint is left."""
    folder = write(endpoint("a", 8000))
    with hold(folder) as lock:
        reaper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    assert is_running(folder)
    reaper.communicate(b"\n")
    assert not is_running(folder)


def test_a_second_one_is_told_of_the_first_and_how_to_stop_it() -> None:
    folder = write(endpoint("a", 8000))
    refuse_second(folder)
    with hold(folder):
        with pytest.raises(LocalError) as error:
            refuse_second(folder)
        with pytest.raises(LocalError) as again, hold(folder):
            pytest.fail("it is held")
    assert str(error.value) == str(again.value)
    assert str(error.value) == (
        f"a is up on port 8000 already, as process {os.getpid()}. Stop it with `tandem down a --port 8000`, "
        "or choose another port with --port."
    )
    with hold(folder):
        pass


def test_a_second_one_is_told_that_what_a_killed_one_has_left_is_being_ended() -> None:
    state = endpoint("a", 8000)
    state.pid_started = (proc.started(os.getpid()) or 0) - 1
    with hold(folder := write(state)), pytest.raises(LocalError) as error:
        refuse_second(folder)
    assert str(error.value) == (
        "What a killed `tandem up` has left of a on port 8000 is just being ended. Try again in some seconds."
    )


def test_one_that_has_only_just_begun_is_told_of_by_its_folder(home: Path) -> None:
    with hold(home / "a" / "8000"), pytest.raises(LocalError) as error:
        refuse_second(home / "a" / "8000")
    assert str(error.value) == f"Another `tandem up` has just begun in {home / 'a' / '8000'}."


def test_a_folder_that_cannot_be_written_into_is_told(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(LocalError, match=r"Cannot write into .*: Not a directory"), hold(home / "a" / "8000"):
        pytest.fail("it cannot be held")


def test_another_process_that_has_its_pid_is_not_taken_for_it() -> None:
    state = endpoint("a", 8000)
    state.pid_started = (proc.started(os.getpid()) or 0) - 1
    with hold(write(state)):
        (found,) = find()
        assert (found.has_up, found.phase) == (False, "stopping")


def test_why_it_ended_is_told_once_it_has() -> None:
    state = endpoint("a", 8000)
    folder = write(state)
    assert find()[0].cause_of_end == "`tandem up` was killed, the machine went down, or its disk was full"
    state.become("stopping", "decode-0 ended with exit code 1: ValueError: no room")
    state.become("ended")
    state.save(folder)
    assert find()[0].cause_of_end == "decode-0 ended with exit code 1: ValueError: no room"
    assert find()[0].state.since > 5.0
