"""Ports of a local endpoint."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tandem.local.errors import LocalError
from tandem.local.ports import engine_ports, require_free

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def test_a_taken_port_is_told_with_the_way_out(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    with pytest.raises(LocalError, match=rf"Port {port} of {HOST} is taken\..*--port"):
        require_free(port, HOST)
    taken.close()
    require_free(port, HOST)


def test_an_address_that_is_not_this_machines_is_told() -> None:
    with pytest.raises(LocalError, match=r"Cannot listen on 203\.0\.113\.1:8000: "):
        require_free(8000, "203.0.113.1")


def test_engines_get_different_free_ports_and_skip_taken_ones() -> None:
    first = engine_ports(1, HOST)[0]
    with socket.create_server((HOST, first.http)), socket.create_server((HOST, first.side_channel)):
        engines = engine_ports(3, HOST)
    given = [p for e in engines for p in (e.http, e.side_channel)]
    assert len(set(given)) == 6
    assert not {first.http, first.side_channel} & set(given)
    assert all(e.http > first.http and e.side_channel > first.side_channel for e in engines)


def test_engines_leave_the_routers_port_alone() -> None:
    first, second = engine_ports(2, HOST)
    assert engine_ports(1, HOST, but={first.http}) == [
        type(first)(http=second.http, side_channel=first.side_channel)
    ]


def test_a_machine_without_free_ports_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(LocalError, match="There are not enough free ports from 8100 to 9099"):
        engine_ports(1, HOST)
