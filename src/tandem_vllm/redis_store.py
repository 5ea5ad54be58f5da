"""A Redis that holds KV chunks, asked with a patience that ends.

Engines go on without it, so an answer that takes too long is none, and a Redis that failed is left alone for
a while: a failure costs a request `PATIENCE_SECONDS` at most, and those that come soon after nothing.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

PATIENCE_SECONDS = 2.0
"""Less than LMCache waits for a look-up (3 s)."""
PAUSE_SECONDS = 10.0
_PORT = 6379
_LONGEST_LINE = 4096


class StoreError(Exception):
    """It could not be asked, or refused; the message says why."""


class StoreAway(StoreError):
    """It failed a short time ago, and is left alone."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int = _PORT
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]. Raises ValueError for any other."""
        try:
            parts = urlsplit(url)
            database = int(parts.path.strip("/") or 0)
            port = parts.port or _PORT
        except ValueError:
            raise ValueError("is no address of a Redis") from None
        if parts.scheme != "redis" or not parts.hostname:
            raise ValueError("must be redis://HOST:PORT")
        user, password = (
            None if each is None else unquote(each) for each in (parts.username, parts.password)
        )
        return cls(parts.hostname, port, user or None, password, database)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class RedisStore:
    """One connection, made when it is needed. For one thread at a time."""

    def __init__(self, address: Address, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self._clock = clock
        self._socket: socket.socket | None = None
        self._reader: io.BufferedReader | None = None
        self._away_until = float("-inf")

    def close(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket = self._reader = None

    def deadline(self) -> float:
        """When the patience for what begins now ends."""
        return self._clock() + PATIENCE_SECONDS

    def sizes(self, keys: Sequence[str], deadline: float) -> list[int]:
        """Bytes of each key's value; 0 where there is none. Raises StoreError."""
        with self._asking(deadline):
            self._send(b"".join(_command(b"STRLEN", key.encode()) for key in keys), deadline)
            return [self._number(b":", deadline) for _ in keys]

    def read(self, key: str, into: memoryview, deadline: float) -> bool:
        """Read a value that fills `into`; False where there is none any more. Raises StoreError."""
        with self._asking(deadline):
            self._send(_command(b"GET", key.encode()), deadline)
            size = self._number(b"$", deadline)
            if size == -1:
                return False
            if size != len(into):
                raise StoreError(f"a value of {len(into):,} bytes has become one of {size:,}")
            done = 0
            while done < size:
                done += self._filled(into[done:], deadline)
            self._line(deadline)
            return True

    def write(self, key: str, value: memoryview, deadline: float) -> None:
        """Raises StoreError."""
        with self._asking(deadline):
            head = b"*3\r\n$3\r\nSET\r\n" + _word(key.encode()) + b"$%d\r\n" % len(value)
            for part in (head, value, b"\r\n"):
                self._send(part, deadline)
            self._ok(deadline)

    @contextmanager
    def _asking(self, deadline: float) -> Iterator[None]:
        """With a connection. After a failure it is closed, as nobody knows what else comes on it, and none is
        made again for a while."""
        if self._clock() < self._away_until:
            raise StoreAway(f"{self.address} failed a short time ago")
        try:
            if self._socket is None:
                self._connect(deadline)
            yield
        except (OSError, StoreError, ValueError) as error:
            self.close()
            self._away_until = self._clock() + PAUSE_SECONDS
            why = f"no answer in {PATIENCE_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
            raise StoreError(why) from None

    def _connect(self, deadline: float) -> None:
        address = self.address
        self._socket = socket.create_connection((address.host, address.port), self._left(deadline))
        self._reader = self._socket.makefile("rb")
        if address.password is not None:
            user = [] if address.user is None else [address.user.encode()]
            self._send(_command(b"AUTH", *user, address.password.encode()), deadline)
            self._ok(deadline)
        if address.database:
            self._send(_command(b"SELECT", b"%d" % address.database), deadline)
            self._ok(deadline)

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return left

    def _send(self, part: bytes | memoryview, deadline: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(self._left(deadline))
        self._socket.sendall(part)

    def _filled(self, into: memoryview, deadline: float) -> int:
        """Bytes that have come and fill the first of `into`."""
        assert self._socket is not None
        assert self._reader is not None
        self._socket.settimeout(self._left(deadline))
        count = self._reader.readinto1(into)
        if not count:
            raise ConnectionError("it has closed the connection")
        return count

    def _line(self, deadline: float) -> bytes:
        assert self._socket is not None
        assert self._reader is not None
        self._socket.settimeout(self._left(deadline))
        line = self._reader.readline(_LONGEST_LINE)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("it has closed the connection")
        if line.startswith(b"-"):
            raise StoreError(line[1:].decode("utf-8", "replace").strip())
        return line[:-2]

    def _number(self, kind: bytes, deadline: float) -> int:
        """The number in a reply of a kind."""
        line = self._line(deadline)
        if not line.startswith(kind):
            raise ValueError(f"answers {line[:40]!r}, which is no Redis")
        return int(line[1:])

    def _ok(self, deadline: float) -> None:
        if self._line(deadline) != b"+OK":
            raise ValueError("answers what no Redis does")


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))
