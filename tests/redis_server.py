"""A real Redis of a test's own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .api.conftest import lacking

_START_SECONDS = 30


@dataclass
class RedisServer:
    program: str
    folder: Path
    port: int
    words: tuple[str, ...] = ()
    """More of its command line."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """An empty one."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self.folder), *self.words]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError((self.folder / "redis.log").read_text("utf-8"))

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It hangs in the block: its port takes connections, and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def ask(self, command: str) -> str:
        """The first line of its answer."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.makefile("rb").readline().decode().strip()

    def values(self) -> int:
        return int(self.ask("DBSIZE").removeprefix(":"))


@contextmanager
def redis_server(folder: Path, *words: str) -> Iterator[RedisServer]:
    program = shutil.which("redis-server") or shutil.which("/usr/bin/redis-server")
    if program is None:
        lacking("needs redis-server: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = RedisServer(program, folder, port, words)
    server.start()
    try:
        yield server
    finally:
        server.stop()
