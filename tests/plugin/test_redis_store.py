"""The plugin's Redis client: what it keeps is what it reads, and whatever Redis does, it ends in time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem_vllm import redis_store
from tandem_vllm.redis_store import PAUSE_SECONDS, Address, RedisStore, StoreAway, StoreError

from ..redis_server import RedisServer, redis_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "PATIENCE_SECONDS", 0.2)


Stores = Callable[..., RedisStore]


@pytest.fixture
def store() -> Iterator[Stores]:
    """Makes them by their URLs."""
    made: list[RedisStore] = []

    def make(url: str, **given: Any) -> RedisStore:
        made.append(RedisStore(Address.parse(url), **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


def write(to: RedisStore, key: str, value: bytes) -> None:
    to.write(key, memoryview(value), to.deadline())


def read(from_: RedisStore, key: str, size: int) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if from_.read(key, memoryview(into), from_.deadline()) else None


def sizes(of: RedisStore, *keys: str) -> list[int]:
    return of.sizes(keys, of.deadline())


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of what answers so, whatever it is asked, and then says no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    if answer:
                        connection.sendall(answer)
            except OSError:
                return  # the test has ended

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for connection in connections:
            connection.close()


def test_what_was_written_is_read_byte_for_byte(server: RedisServer, store: Stores) -> None:
    value = bytes(range(256)) * 20_000
    one, other = store(server.url), store(server.url)
    write(one, "a", value)
    write(one, "b", b"\r\n$-1\r\n")
    assert sizes(other, "a", "b", "c") == [len(value), 7, 0]
    assert read(other, "a", len(value)) == value
    assert read(other, "b", 7) == b"\r\n$-1\r\n"
    assert read(other, "c", 1) is None
    assert sizes(other, "b") == [7], "the connection goes on"


def test_users_and_databases_are_its_own(tmp_path: Path, store: Stores) -> None:
    with redis_server(tmp_path, "--requirepass", "a:b@c") as server:
        host = f"127.0.0.1:{server.port}"
        mine = store(f"redis://:a%3Ab%40c@{host}/3")
        write(mine, "a", b"x")
        assert sizes(store(f"redis://default:a%3Ab%40c@{host}/3"), "a") == [1]
        assert sizes(store(f"redis://:a%3Ab%40c@{host}"), "a") == [0]
        with pytest.raises(StoreError, match=r"^NOAUTH"):
            sizes(store(f"redis://{host}"), "a")
        with pytest.raises(StoreError, match=r"^WRONGPASS"):
            sizes(store(f"redis://:other@{host}"), "a")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://cache", "cache:6379"),
        ("redis://cache:7000/2", "cache:7000"),
        ("redis://user:secret@[::1]:7000", "::1:7000"),
    ],
)
def test_an_address_is_told_without_its_password(url: str, told: str) -> None:
    assert str(Address.parse(url)) == told
    assert "secret" not in repr(Address.parse(url))


@pytest.mark.parametrize("url", ["http://c:80", "redis://", "redis://c:port", "redis://c/x", "c:6379"])
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis://HOST:PORT|is no address"):
        Address.parse(url)


@pytest.mark.usefixtures("impatient")
def test_a_redis_that_hangs_is_given_up_in_time_and_asked_again_later(
    server: RedisServer, store: Stores
) -> None:
    real = store(server.url)
    write(real, "a", b"x")
    with server.frozen(), pytest.raises(StoreError, match=r"^no answer in 0\.2 s$"):
        sizes(real, "a")
    with pytest.raises(StoreAway):
        sizes(real, "a")
    real._away_until = float("-inf")  # later
    assert sizes(real, "a") == [1]


def test_after_a_failure_it_is_not_asked_for_a_while(store: Stores) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        clock = Clock()
        away = store(f"redis://127.0.0.1:{nobody.getsockname()[1]}", clock=clock)
        with pytest.raises(StoreError, match="refused"):
            sizes(away, "a")
        for now in (0.1, PAUSE_SECONDS - 0.1):
            clock.now = now
            with pytest.raises(StoreAway):
                write(away, "a", b"x")
        clock.now = PAUSE_SECONDS + 0.1
        with pytest.raises(StoreError, match="refused"):
            sizes(away, "a")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", [b"", b":1", b"$100\r\nabc", b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n"])
def test_whatever_answers_it_ends(store: Stores, answer: bytes) -> None:
    with answering(answer) as url:
        with pytest.raises(StoreError):
            sizes(store(url), "a")
        with pytest.raises(StoreError):
            read(store(url), "a", 100)
        with pytest.raises(StoreError):
            write(store(url), "a", b"x")


def test_a_full_redis_refuses_writes_and_gives_what_it_has(server: RedisServer, store: Stores) -> None:
    server.ask("CONFIG SET maxmemory-policy noeviction")
    one = store(server.url)
    write(one, "a", b"x" * 1000)
    server.ask("CONFIG SET maxmemory 1mb")
    with pytest.raises(StoreError, match=r"^OOM "):
        write(one, "b", b"x" * 2_000_000)
    assert read(store(server.url), "a", 1000) == b"x" * 1000
