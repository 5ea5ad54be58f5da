"""Time that a test passes, a follower of a discovery source, and a name server whose records a test sets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
from dns.asyncresolver import Resolver

from tandem.router.discovery import Discovery, Member


class Time:
    """A clock and a sleep for one sleeper."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.asleep = asyncio.Event()
        self._woken = asyncio.Event()
        self._until = 0.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._until = self.now + seconds
        self._woken.clear()
        self.asleep.set()
        await self._woken.wait()

    def advance(self, seconds: float) -> bool:
        """Whether the sleeper wakes up."""
        self.now += seconds
        if self.now < self._until:
            return False
        self.asleep.clear()
        self._woken.set()
        return True


class Followed:
    """What a source has told, and time for it to tell more."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.told: list[frozenset[Member]] = []
        self.task: asyncio.Task[None] | None = None

    async def _follow(self, source: Discovery) -> None:
        async for members in source.watch():
            self.told.append(members)

    async def start(self, source: Discovery) -> None:
        """Until it has nothing to do for now."""
        self.time.asleep.clear()
        self.task = asyncio.create_task(self._follow(source))
        await self._quiet()

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def after(self, seconds: float) -> None:
        """Let time pass, and the source do what it does then."""
        if self.time.advance(seconds):
            await self._quiet()

    async def _quiet(self) -> None:
        assert self.task is not None
        asleep = asyncio.create_task(self.time.asleep.wait())
        await asyncio.wait({asleep, self.task}, return_when=asyncio.FIRST_COMPLETED)
        asleep.cancel()
        if self.task.done():
            self.task.result()

    @property
    def urls(self) -> set[str]:
        """Those of the engines told last."""
        return {member.url for member in self.told[-1]}


@asynccontextmanager
async def following(source: Discovery, time: Time) -> AsyncIterator[Followed]:
    followed = Followed(time)
    await followed.start(source)
    try:
        yield followed
    finally:
        await followed.stop()


@dataclass
class NameServer:
    """Answers over UDP and TCP at one port of 127.0.0.1, cutting what is too long for UDP."""

    port: int = 0
    records: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """TTL and values by name and type."""
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """Questions that are answered with this code, or not at all for `silence`."""
    negative_ttl: int = 5
    sends_along: bool = False
    """Whether the addresses of SRV targets come with the answer."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    over_tcp: int = 0

    def set(self, name: str, kind: str, *values: str, ttl: int = 30) -> None:
        """Give a name records of a type; none takes them away."""
        if values:
            self.records[name, kind] = ttl, values
        else:
            self.records.pop((name, kind), None)

    def resolver(self) -> Resolver:
        made = Resolver(configure=False)
        made.nameservers = ["127.0.0.1"]
        made.port = self.port
        made.lifetime = 0.05 if "silence" in self.broken.values() else 5.0
        return made

    def reply(self, wire: bytes) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        answer = dns.message.make_response(query)
        if code := self.broken.get((name, kind)):
            if code == "silence":
                return None
            answer.set_rcode(dns.rcode.from_text(code))
            return answer.to_wire()
        while (alias := self._rrset(name, "CNAME")) is not None:
            answer.answer.append(alias)
            name = alias[0].to_text().rstrip(".")
        found = self._rrset(name, kind)
        if found is not None:
            answer.answer.append(found)
            if kind == "SRV" and self.sends_along:
                targets = {record.target.to_text().rstrip(".") for record in found}
                along = [self._rrset(target, t) for target in sorted(targets) for t in ("A", "AAAA")]
                answer.additional += [rrset for rrset in along if rrset is not None]
        else:
            if not any(known == name for known, _ in self.records):
                answer.set_rcode(dns.rcode.NXDOMAIN)
            soa = f"ns.test. admin.test. 1 2 3 4 {self.negative_ttl}"
            answer.authority.append(dns.rrset.from_text(dns.name.root, self.negative_ttl, "IN", "SOA", soa))
        return answer.to_wire()

    def _rrset(self, name: str, kind: str) -> dns.rrset.RRset | None:
        if (name, kind) not in self.records:
            return None
        ttl, values = self.records[name, kind]
        return dns.rrset.from_text_list(f"{name}.", ttl, "IN", kind, list(values))

    async def over_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        reply = self.reply(await reader.readexactly(length))
        self.over_tcp += 1
        if reply is not None:
            writer.write(struct.pack("!H", len(reply)) + reply)
            await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._server.reply(data)
        if reply is None:
            return
        if len(reply) > 512:
            cut = dns.message.make_response(dns.message.from_wire(data))
            cut.flags |= dns.flags.TC
            reply = cut.to_wire()
        self._transport.sendto(reply, addr)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    server = NameServer()
    streams = await asyncio.start_server(server.over_stream, "127.0.0.1", 0)
    server.port = streams.sockets[0].getsockname()[1]
    datagrams, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Datagrams(server), local_addr=("127.0.0.1", server.port)
    )
    try:
        yield server
    finally:
        datagrams.close()
        streams.close()
        await streams.wait_closed()
