"""Runs inside a cluster: takes HTTP/1.1 connections at a Unix socket, which those outside share, and passes
each on to the host that its first request names.

    python relay.py SOCKET      until its standard input ends
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import closing, suppress

_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r:]+)(?::(\d+))?\r\n", re.IGNORECASE)


async def relayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection; it ends when either side ends it, and at once where the host cannot be reached."""
    with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        named = _HOST.search(head)
        if named is None:
            return
        host, port = named[1].decode(), int(named[2] or 80)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError as error:
            print(f"{host}:{port}: {error}", file=sys.stderr, flush=True)
            return
        with closing(far_writer):
            far_writer.write(head)
            directions = [
                asyncio.create_task(_copied(reader, far_writer)),
                asyncio.create_task(_copied(far_reader, writer)),
            ]
            _, running = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                task.cancel()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


async def main(socket: str) -> None:
    server = await asyncio.start_unix_server(relayed, socket)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
