"""Ports of a local endpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.local import ports
from tandem.local.errors import LocalError
from tandem.local.listeners import listener
from tandem.local.ports import engine_ports, free_port, require_free

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def test_a_taken_port_is_told_with_the_way_out(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    holder = rf"process {os.getpid()}: "
    with pytest.raises(LocalError, match=rf"Port {port} of {HOST} is taken \({holder}.*--port"):
        require_free(port, HOST)
    taken.close()
    require_free(port, HOST)


def test_an_address_that_is_not_this_machines_is_told() -> None:
    with pytest.raises(LocalError, match=r"Cannot listen on 203\.0\.113\.1:8000: "):
        require_free(8000, "203.0.113.1")


@pytest.fixture(autouse=True)
def _own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ports claimed in a test are claimed for that test only, and not before the rest of the machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_claimed", claimed := [])
    yield
    for file in claimed:
        file.close()


def test_a_port_that_another_process_has_claimed_is_not_given(tmp_path: Path) -> None:
    """Its engine will bind it only half a minute later."""
    code = (
        "from tandem.local.ports import engine_ports; ports = engine_ports(1, '127.0.0.1')[0]\n"
        "print(ports.http, ports.side_channel, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        mine = engine_ports(2, HOST)
        assert not theirs & {p for e in mine for p in (e.http, e.side_channel)}
        other.communicate("\n")
    assert theirs & {p for e in engine_ports(2, HOST) for p in (e.http, e.side_channel)}


def test_engines_get_different_free_ports_and_skip_taken_ones() -> None:
    first = engine_ports(1, HOST)[0]
    with socket.create_server((HOST, first.http)), socket.create_server((HOST, first.side_channel)):
        engines = engine_ports(3, HOST)
    given = [p for e in engines for p in (e.http, e.side_channel)]
    assert len(set(given)) == 6
    assert not {first.http, first.side_channel} & set(given)
    assert all(e.http > first.http and e.side_channel > first.side_channel for e in engines)


def test_engines_leave_the_routers_port_alone() -> None:
    first, second, third = engine_ports(3, HOST)
    for file in ports._claimed:
        file.close()
    (given,) = engine_ports(1, HOST, but={first.http, second.http})
    assert (given.http, given.side_channel) == (third.http, first.side_channel)


def test_a_machine_without_free_ports_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(LocalError, match="There are not enough free ports from 8100 to 9099"):
        engine_ports(1, HOST)


def test_ports_cannot_be_noted_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    with pytest.raises(LocalError, match=rf"^Cannot note which ports are taken: {file}/.*set TMPDIR\.$"):
        engine_ports(1, HOST)


@pytest.mark.parametrize("made", ["others may write to it", "a link"])
def test_notes_go_nowhere_where_another_user_could_lead_them(tmp_path: Path, made: str) -> None:
    """To a file of this user's, say, which would be emptied."""
    folder, elsewhere = tmp_path / f"tandem-ports-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if made == "a link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(LocalError, match=rf"^{folder} is not a folder of this user alone, .* set TMPDIR to "):
        engine_ports(1, HOST)
    assert list(folder.iterdir()) == []


def test_an_address_that_no_port_can_be_had_of_is_told() -> None:
    with pytest.raises(LocalError, match=r"^Cannot listen on 203\.0\.113\.1: "):
        free_port(8000, "203.0.113.1")


def test_nobody_listens_on_a_port_that_is_free(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    found = listener(port)
    assert found is not None
    assert (found.pid, found.is_router) == (os.getpid(), False)
    assert found.endpoint() == found
    taken.close()
    assert listener(port) is None
