"""Engines that DNS names: the addresses of a name, or the targets of a service's SRV records.

What is known of each question is kept by itself: an answer counts until its TTL ends; a question that fails
(no answer in time, SERVFAIL) keeps what it had; one that is suddenly answered with nothing is believed the
second time. So a name server in trouble takes no engine away.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import dns.name
import dns.rcode
from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.name import Name
from dns.rdatatype import RdataType
from dns.resolver import NXDOMAIN, Answer, LifetimeTimeout, NoNameservers

from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.engine_list import ENGINES_LIMIT, Subscriptions
from tandem.router.engines import EngineRole
from tandem.router.few import few
from tandem.router.trouble import Trouble

logger = logging.getLogger("tandem.router")

A, AAAA, SRV = RdataType.A, RdataType.AAAA, RdataType.SRV

# Bounds on TTLs in seconds: of answers, and of the news that there is nothing, which a service that starts
# makes untrue.
_SHORTEST, _LONGEST, _LONGEST_NOTHING = 1.0, 300.0, 30.0

_RETRY = 5.0  # seconds until a question that failed is asked again
_AT_ONCE = 16  # questions
_SHOWN = 3  # troubles told at once; the others are counted

_Question = tuple[Name, RdataType]


@dataclass(slots=True)
class _Known:
    """What is known of one question."""

    records: tuple[Any, ...] = ()
    """`dns.rdata.Rdata` of its type."""
    until: float = float("-inf")
    nothing: str = ""
    """How the last answer said that there is nothing, if it did."""
    trouble: str = ""

    def learn(self, records: Iterable[Any], until: float) -> None:
        self.records, self.until, self.nothing, self.trouble = tuple(records), until, "", ""

    def learn_nothing(self, told: str, until: float) -> None:
        if self.records and not self.nothing:
            self.trouble = f"{told}; that is believed once it is said again"
        else:
            self.records, self.trouble = (), ""
        self.nothing, self.until = told, until

    def fail(self, why: str, until: float) -> None:
        self.nothing, self.trouble, self.until = "", why, until


@dataclass(slots=True)
class _Look:
    """One round of questions."""

    resolver: Resolver
    asked: set[_Question] = field(default_factory=set)
    troubles: set[str] = field(default_factory=set)


class DnsDiscovery(Discovery):
    """Follows a name, each address of which is an engine; or a service's SRV records, each target and port
    of which is one: those of the best (lowest) priority, whatever their weights.

    Names are looked up as /etc/resolv.conf says, search domains included; /etc/hosts is not read.
    """

    def __init__(
        self,
        role: EngineRole,
        name: str,
        port: int | None = None,
        *,
        subscriptions: Subscriptions = lambda host: None,
        resolver: Callable[[], Resolver] = Resolver,
        limit: int = ENGINES_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`name` has addresses where a port is given, else SRV records; `subscriptions` tells where the
        engine at an address publishes its KV events. `resolver` makes one for each round of questions, so
        that a changed resolv.conf is seen. Raises ValueError where `name` cannot be a name."""
        self._name = _parsed(name)
        self._role = role
        self._port = port
        self._subscriptions = subscriptions
        self._resolver = resolver
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._known: dict[_Question, _Known] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._members: frozenset[Member] = frozenset()
        self._trouble = Trouble(f"{role.value} engines of the DNS name {name}")
        self._families_told = False

    @property
    def trouble(self) -> str | None:
        """What is wrong with the name or with DNS now, and what comes of it."""
        return self._trouble.text

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """See `Discovery.watch`."""
        told: frozenset[Member] | None = None
        while True:
            pause = await self._refresh()
            if self._members != told:
                told = self._members
                yield told
            await self._sleep(pause)

    async def _refresh(self) -> float:
        """Bring the members up to date. Returns the seconds until the next answer ends."""
        try:
            look = _Look(self._resolver())
        except (DNSException, OSError) as error:
            self._tell({f"/etc/resolv.conf cannot be used: {error}"})
            return _RETRY
        found = await (self._services(look) if self._port is None else self._addresses(look, self._port))
        # What nobody asks for any more, such as a target that left, is forgotten.
        self._known = {question: self._known[question] for question in look.asked}
        look.troubles.update(known.trouble for known in self._known.values() if known.trouble)
        if len(found) > self._limit:
            look.troubles.add(f"there are more than {self._limit:,} addresses")
        else:
            self._members = frozenset(self._member(address, port) for address, port in found)
        if not found and not look.troubles:
            look.troubles.update(known.nothing for known in self._known.values() if known.nothing)
        self._tell(look.troubles)
        ends = min(known.until for known in self._known.values())
        return max(_SHORTEST, ends - self._clock())

    async def _addresses(self, look: _Look, port: int) -> set[tuple[str, int]]:
        v4, v6 = await asyncio.gather(self._ask(look, self._name, A), self._ask(look, self._name, AAAA))
        if v4 and v6 and not self._families_told:
            self._families_told = True
            logger.warning(
                "%s has IPv4 and IPv6 addresses, each of which is taken for an engine. If they are the same "
                "engines, give a name that has only one kind",
                _text(self._name),
            )
        return {(record.address, port) for record in (*v4, *v6)}

    async def _services(self, look: _Look) -> set[tuple[str, int]]:
        records = await self._ask(look, self._name, SRV)
        # A target of "." says that the service is not to be had here (RFC 2782); at port 0 nothing listens.
        usable = [r for r in records if r.target != dns.name.root and r.port]
        if records and not usable:
            look.troubles.add(f"{_text(self._name)} has SRV records without a target: no such service here")
        best = min((record.priority for record in usable), default=0)
        services = [r for r in usable if r.priority == best]
        if len(services) > self._limit:
            return {(_text(r.target), r.port) for r in services}
        targets = list({r.target for r in services})
        found = dict(
            zip(targets, await asyncio.gather(*(self._of_target(look, t) for t in targets)), strict=True)
        )
        return {(address, r.port) for r in services for address in found[r.target]}

    async def _of_target(self, look: _Look, target: Name) -> list[str]:
        """A target is one engine: where it has addresses of both kinds, one kind is enough."""
        records = await self._ask(look, target, A) or await self._ask(look, target, AAAA)
        if not records and self._known[target, A].nothing:
            look.troubles.add(f"its target {_text(target)} has no address")
        return [record.address for record in records]

    async def _ask(self, look: _Look, name: Name, kind: RdataType) -> tuple[Any, ...]:
        """The records of a question: those of a new answer, where the last one ended."""
        look.asked.add((name, kind))
        known = self._known.setdefault((name, kind), _Known())
        if self._clock() < known.until:
            return known.records
        try:
            async with self._slots:
                answer = await look.resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
        except NXDOMAIN as error:
            tried = ", ".join(map(_text, error.kwargs["qnames"]))
            ttl = min(r.resolve_chaining().minimum_ttl for r in error.kwargs["responses"].values())
            known.learn_nothing(f"no such name: {tried}", self._end(ttl, _LONGEST_NOTHING))
        except (DNSException, OSError) as error:
            known.fail(f"{kind.name} of {_text(name)}: {_why(error)}", self._end(_RETRY))
        else:
            ttl = answer.chaining_result.minimum_ttl
            if answer.rrset:
                known.learn(answer.rrset, self._end(ttl))
                self._learn_additional(answer)
            else:
                nothing = f"{_text(answer.qname)} has no {kind.name} records"
                known.learn_nothing(nothing, self._end(ttl, _LONGEST_NOTHING))
        return known.records

    def _learn_additional(self, answer: Answer) -> None:
        """Name servers send the addresses of SRV targets along: a question for each less."""
        targets = {record.target for record in answer.rrset or () if record.rdtype is SRV}
        for rrset in answer.response.additional:
            if rrset.name in targets and rrset.rdtype in (A, AAAA):
                question = rrset.name, rrset.rdtype
                self._known.setdefault(question, _Known()).learn(rrset, self._end(rrset.ttl))

    def _end(self, ttl: float, longest: float = _LONGEST) -> float:
        return self._clock() + min(max(ttl, _SHORTEST), longest)

    def _member(self, address: str, port: int) -> Member:
        host = f"[{address}]" if ":" in address else address
        return Member(f"http://{host}:{port}", self._role, kv_events=self._subscriptions(address))

    def _tell(self, troubles: set[str]) -> None:
        if not troubles:
            self._trouble.over()
            return
        then = "those found stay in use" if self._members else "there are none"
        self._trouble.tell("; ".join([*few(sorted(troubles), _SHOWN), then]))


def _parsed(name: str) -> Name:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        raise ValueError(f"{name} is an address and no name: give the engine as http://{name}:PORT")
    try:
        return dns.name.from_text(name, None)
    except DNSException as error:
        raise ValueError(f"{name!r} cannot be a DNS name: {error}") from None


def _text(name: Name) -> str:
    return name.to_text(omit_final_dot=True)


def _why(error: Exception) -> str:
    """Why a question failed, in words that are the same each time."""
    if isinstance(error, LifetimeTimeout):
        return "no name server answered in time"
    if isinstance(error, NoNameservers):
        codes = {dns.rcode.to_text(e[4].rcode()) for e in error.kwargs["errors"] if e[4] is not None}
        return f"the name servers failed ({', '.join(sorted(codes)) or 'unreachable'})"
    return str(error) or type(error).__name__
