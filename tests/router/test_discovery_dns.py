"""Engines that DNS names, asked of a real name server: addresses, services, TTLs, and DNS in trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from dns.asyncresolver import Resolver
from dns.resolver import NoResolverConfiguration

from tandem.config import Subscription
from tandem.router.discovery import DnsDiscovery, Member
from tandem.router.engines import EngineRole

from .discovery_fakes import Followed, NameServer, Time, following, name_server

NAME, SERVICE = "prefill.test", "_http._tcp.prefill.test"

Follow = Callable[..., AbstractAsyncContextManager[Followed]]


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with name_server() as server:
        yield server


def discovery(
    server: NameServer, time: Time, name: str = NAME, port: int | None = 8081, **options: Any
) -> DnsDiscovery:
    given = {"resolver": server.resolver, "clock": time.clock, "sleep": time.sleep, **options}
    return DnsDiscovery(EngineRole.PREFILL, name, port, **given)


def urls(*hosts: str, port: int = 8081) -> set[str]:
    return {f"http://{host}:{port}" for host in hosts}


async def test_each_address_of_a_name_is_an_engine(server: NameServer) -> None:
    server.set(NAME, "A", "10.0.0.1", "10.0.0.2")
    server.set(NAME, "AAAA", "fd00::0:1")
    time = Time()

    def subscriptions(host: str) -> Subscription | None:
        return Subscription("tcp://*:5557").at(host)

    async with following(discovery(server, time, subscriptions=subscriptions), time) as followed:
        assert followed.told == [
            {
                Member(
                    f"http://{host}:8081", EngineRole.PREFILL, kv_events=Subscription(f"tcp://{host}:5557")
                )
                for host in ("10.0.0.1", "10.0.0.2", "[fd00::1]")
            }
        ]


async def test_a_change_is_seen_when_the_ttl_ends_and_not_asked_for_before(server: NameServer) -> None:
    server.set(NAME, "A", "10.0.0.1", ttl=20)
    server.set(NAME, "AAAA", "fd00::1", ttl=60)
    time = Time()
    async with following(discovery(server, time), time) as followed:
        assert time.pauses == [20]
        server.asked.clear()
        server.set(NAME, "A", "10.0.0.2", ttl=60)
        await followed.after(19.9)
        assert server.asked == []
        await followed.after(0.1)
        assert server.asked == [(NAME, "A")]  # what is known of the other type has not ended
        assert followed.urls == urls("10.0.0.2", "[fd00::1]")
        await followed.after(40)
        assert server.asked == [(NAME, "A"), (NAME, "AAAA")]
        assert len(followed.told) == 2  # nothing new to tell


@pytest.mark.parametrize(("ttl", "pause"), [(0, 1), (1, 1), (299, 299), (86_400, 300)])
async def test_names_are_looked_up_every_second_at_most_and_every_five_minutes_at_least(
    server: NameServer, ttl: int, pause: int
) -> None:
    server.set(NAME, "A", "10.0.0.1", ttl=ttl)
    server.set(NAME, "AAAA", "fd00::1", ttl=ttl)
    time = Time()
    async with following(discovery(server, time), time):
        assert time.pauses == [pause]


async def test_an_alias_is_followed_and_its_ttl_counts_too(server: NameServer) -> None:
    server.set(NAME, "CNAME", "pool.test.", ttl=7)
    server.set("pool.test", "A", "10.0.0.1", ttl=60)
    server.set("pool.test", "AAAA", "fd00::1", ttl=60)
    time = Time()
    async with following(discovery(server, time), time) as followed:
        assert followed.urls == urls("10.0.0.1", "[fd00::1]")
        assert time.pauses == [7]


async def test_search_domains_hold_as_resolv_conf_says(server: NameServer, tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\nsearch models.svc.test svc.test\noptions ndots:5\n")

    def resolver() -> Resolver:
        made = Resolver(filename=str(conf))
        made.port = server.port
        return made

    server.set("prefill.models.svc.test", "A", "10.0.0.1")
    time = Time()
    source = discovery(server, time, "prefill.models", resolver=resolver)
    async with following(source, time) as followed:
        assert followed.urls == urls("10.0.0.1")
        asked = [name for name, kind in server.asked if kind == "A"]
        assert asked == ["prefill.models.models.svc.test", "prefill.models.svc.test"]
        # A changed file counts from the next question on.
        conf.write_text("nameserver 127.0.0.1\nsearch other.test\noptions ndots:5\n")
        server.set("prefill.models.other.test", "A", "10.0.0.2")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.2")


async def test_more_addresses_than_a_datagram_holds_come_over_tcp(server: NameServer) -> None:
    hosts = [f"10.0.{n}.1" for n in range(200)]
    server.set(NAME, "A", *hosts)
    time = Time()
    async with following(discovery(server, time), time) as followed:
        assert followed.urls == urls(*hosts)
        assert server.over_tcp == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("SERVFAIL", "A of prefill.test: the name servers failed (SERVFAIL); those found stay in use"),
        ("REFUSED", "A of prefill.test: the name servers failed (REFUSED); those found stay in use"),
        ("silence", "A of prefill.test: no name server answered in time; those found stay in use"),
    ],
)
async def test_dns_in_trouble_takes_no_engine_away(
    server: NameServer, fault: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.set(NAME, "A", "10.0.0.1")
    server.set(NAME, "AAAA", "fd00::1", ttl=300)
    time = Time()
    source = discovery(server, time)
    async with following(source, time) as followed:
        server.broken[NAME, "A"] = fault
        caplog.clear()
        for _ in range(3):
            await followed.after(time.pauses[-1])
        assert source.trouble == told
        assert caplog.messages == [f"prefill engines of the DNS name {NAME}: {told}"]
        assert len(followed.told) == 1
        assert time.pauses[-1] == 5
        server.broken.clear()
        server.set(NAME, "A", "10.0.0.2")
        await followed.after(5)
        assert followed.urls == urls("10.0.0.2", "[fd00::1]")
        assert source.trouble is None


async def test_one_type_that_always_fails_does_not_hide_the_other(server: NameServer) -> None:
    server.set(NAME, "A", "10.0.0.1")
    server.broken[NAME, "AAAA"] = "SERVFAIL"
    time = Time()
    source = discovery(server, time)
    async with following(source, time) as followed:
        assert followed.urls == urls("10.0.0.1")
        assert "AAAA of prefill.test" in (source.trouble or "")
        server.set(NAME, "A", "10.0.0.2")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.2")


async def test_a_name_server_that_cannot_be_reached_is_tried_again(server: NameServer) -> None:
    conf = Resolver(configure=False)

    def unconfigured() -> Resolver:
        if not conf.nameservers:
            raise NoResolverConfiguration("no nameservers")
        return conf

    time = Time()
    source = discovery(server, time, resolver=unconfigured)
    server.set(NAME, "A", "10.0.0.1")
    async with following(source, time) as followed:
        assert followed.told == [frozenset()]
        assert source.trouble == "/etc/resolv.conf cannot be used: no nameservers; there are none"
        conf.nameservers, conf.port = ["127.0.0.1"], server.port
        await followed.after(5)
        assert followed.urls == urls("10.0.0.1")


@pytest.mark.parametrize("gone", ["the name", "its addresses"])
async def test_that_there_is_nothing_is_believed_the_second_time(
    server: NameServer, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.set(NAME, "A", "10.0.0.1")
    if gone == "its addresses":
        server.set(NAME, "TXT", "still there")
    told = {"the name": f"no such name: {NAME}", "its addresses": f"{NAME} has no A records"}[gone]
    time = Time()
    source = discovery(server, time)
    async with following(source, time) as followed:
        server.set(NAME, "A")
        await followed.after(30)
        assert len(followed.told) == 1
        assert source.trouble == f"{told}; that is believed once it is said again; those found stay in use"
        await followed.after(server.negative_ttl)
        assert followed.urls == set()
        assert told in (source.trouble or "")
        assert (source.trouble or "").endswith("; there are none")
        assert caplog.messages[-1] == f"prefill engines of the DNS name {NAME}: {source.trouble}"


async def test_a_failure_in_between_begins_the_count_again(server: NameServer) -> None:
    server.set(NAME, "A", "10.0.0.1")
    time = Time()
    async with following(discovery(server, time), time) as followed:
        server.set(NAME, "A")
        await followed.after(30)
        server.broken[NAME, "A"] = "SERVFAIL"
        await followed.after(5)
        server.broken.clear()
        await followed.after(5)
        assert followed.urls == urls("10.0.0.1")
        await followed.after(5)
        assert followed.urls == set()


async def test_addresses_that_are_back_the_second_time_never_left(server: NameServer) -> None:
    server.set(NAME, "A", "10.0.0.1")
    time = Time()
    source = discovery(server, time)
    async with following(source, time) as followed:
        for _ in range(3):
            server.set(NAME, "A")
            await followed.after(30)
            server.set(NAME, "A", "10.0.0.1")
            await followed.after(5)
        assert len(followed.told) == 1
        assert source.trouble is None


async def test_a_service_that_starts_later_is_found_soon(server: NameServer) -> None:
    server.negative_ttl = 3600
    time = Time()
    source = discovery(server, time)
    async with following(source, time) as followed:
        assert followed.told == [frozenset()]
        assert source.trouble == f"no such name: {NAME}; there are none"
        server.set(NAME, "A", "10.0.0.1")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.1")
        assert source.trouble is None


async def test_addresses_of_both_kinds_may_be_the_same_engines_which_is_said_once(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.set(NAME, "A", "10.0.0.1")
    server.set(NAME, "AAAA", "fd00::1")
    time = Time()
    async with following(discovery(server, time), time) as followed:
        await followed.after(30)
        assert [m for m in caplog.messages if "IPv4 and IPv6" in m] == [
            "prefill.test has IPv4 and IPv6 addresses, each of which is taken for an engine. If they are the "
            "same engines, give a name that has only one kind"
        ]


@pytest.mark.parametrize("sends_along", [True, False])
async def test_each_target_and_port_of_a_service_is_an_engine(server: NameServer, sends_along: bool) -> None:
    server.sends_along = sends_along
    server.set(SERVICE, "SRV", "0 10 8081 p0.test.", "0 90 8082 p0.test.", "0 0 8081 p1.test.")
    server.set("p0.test", "A", "10.0.0.1")
    server.set("p1.test", "AAAA", "fd00::1")
    time = Time()
    async with following(discovery(server, time, SERVICE, None), time) as followed:
        assert followed.urls == {"http://10.0.0.1:8081", "http://10.0.0.1:8082", "http://[fd00::1]:8081"}
        assert (("p0.test", "A") in server.asked) is not sends_along


async def test_only_targets_of_the_best_priority_are_engines(server: NameServer) -> None:
    server.sends_along = True
    server.set(SERVICE, "SRV", "10 0 8081 p0.test.", "20 0 8081 p1.test.", "10 0 8081 p2.test.")
    for n in range(3):
        server.set(f"p{n}.test", "A", f"10.0.0.{n}")
    time = Time()
    async with following(discovery(server, time, SERVICE, None), time) as followed:
        assert followed.urls == urls("10.0.0.0", "10.0.0.2")
        server.set(SERVICE, "SRV", "20 0 8081 p1.test.")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.1")


@pytest.mark.parametrize("sends_along", [True, False])
@pytest.mark.parametrize("said", ["0 0 0 .", "0 0 8081 .", "7 9 1 .", "0 0 0 p0.test."])
async def test_a_service_that_is_said_not_to_be_had_has_no_engines(
    server: NameServer, said: str, sends_along: bool
) -> None:
    """RFC 2782: a target of "."."""
    server.sends_along = sends_along
    server.set(SERVICE, "SRV", "0 0 8081 p0.test.")
    for name in ("p0.test", ""):
        server.set(name, "A", "10.0.0.1")
    time = Time()
    source = discovery(server, time, SERVICE, None)
    async with following(source, time) as followed:
        assert followed.urls == urls("10.0.0.1")
        server.set(SERVICE, "SRV", said)
        await followed.after(30)
        assert followed.told[-1] == frozenset()
        assert "no such service here; there are none" in (source.trouble or "")
        server.set(SERVICE, "SRV", said, "9 0 8081 p0.test.")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.1"), "the records that name an engine count"
        assert source.trouble is None


async def test_a_target_of_a_service_with_addresses_of_both_kinds_is_one_engine(server: NameServer) -> None:
    server.set(SERVICE, "SRV", "0 0 8081 p0.test.")
    server.set("p0.test", "A", "10.0.0.1")
    server.set("p0.test", "AAAA", "fd00::1")
    time = Time()
    async with following(discovery(server, time, SERVICE, None), time) as followed:
        assert followed.urls == urls("10.0.0.1")


async def test_targets_come_and_go_as_their_own_ttls_end(server: NameServer) -> None:
    server.set(SERVICE, "SRV", "0 0 8081 p0.test.", ttl=60)
    server.set("p0.test", "A", "10.0.0.1", ttl=20)
    time = Time()
    async with following(discovery(server, time, SERVICE, None), time) as followed:
        assert time.pauses == [20]
        server.asked.clear()
        server.set("p0.test", "A", "10.0.0.2", ttl=300)
        await followed.after(20)
        assert server.asked == [("p0.test", "A")]
        assert followed.urls == urls("10.0.0.2")
        server.set(SERVICE, "SRV", "0 0 8081 p1.test.", "0 0 8081 p0.test.")
        server.set("p1.test", "A", "10.0.0.3")
        await followed.after(40)
        assert followed.urls == urls("10.0.0.2", "10.0.0.3")
        server.set(SERVICE, "SRV", "0 0 8081 p1.test.")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.3")


async def test_a_target_without_an_address_is_told(server: NameServer) -> None:
    server.set(SERVICE, "SRV", "0 0 8081 p0.test.", "0 0 8081 p1.test.")
    server.set("p0.test", "A", "10.0.0.1")
    time = Time()
    source = discovery(server, time, SERVICE, None)
    async with following(source, time) as followed:
        assert followed.urls == urls("10.0.0.1")
        assert source.trouble == "its target p1.test has no address; those found stay in use"


async def test_a_target_whose_name_server_fails_stays(server: NameServer) -> None:
    server.set(SERVICE, "SRV", "0 0 8081 p0.test.", "0 0 8081 p1.test.")
    server.set("p0.test", "A", "10.0.0.1")
    server.set("p1.test", "A", "10.0.0.2")
    time = Time()
    source = discovery(server, time, SERVICE, None)
    async with following(source, time) as followed:
        server.broken["p1.test", "A"] = "SERVFAIL"
        server.set("p0.test", "A", "10.0.0.9")
        await followed.after(30)
        assert followed.urls == urls("10.0.0.9", "10.0.0.2")
        assert "A of p1.test: the name servers failed" in (source.trouble or "")


async def test_a_service_that_says_it_is_not_here_has_no_engines(server: NameServer) -> None:
    server.set(SERVICE, "SRV", "0 0 0 .")
    time = Time()
    async with following(discovery(server, time, SERVICE, None), time) as followed:
        assert followed.told == [frozenset()]


@pytest.mark.parametrize("kind", ["addresses", "services"])
async def test_more_engines_than_the_limit_are_not_taken(server: NameServer, kind: str) -> None:
    def have(number: int) -> None:
        if kind == "addresses":
            server.set(NAME, "A", *(f"10.0.0.{n}" for n in range(number)))
        else:
            server.set(SERVICE, "SRV", *(f"0 0 {8081 + n} p0.test." for n in range(number)))

    server.set("p0.test", "A", "10.0.0.1")
    have(3)
    time = Time()
    name, port = (NAME, 8081) if kind == "addresses" else (SERVICE, None)
    source = discovery(server, time, name, port, limit=3)
    async with following(source, time) as followed:
        known = followed.urls
        assert len(known) == 3
        have(4)
        await followed.after(30)
        assert followed.urls == known
        assert source.trouble == "there are more than 3 addresses; those found stay in use"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("10.0.0.7", r"10\.0\.0\.7 is an address and no name: give the engine as http://10\.0\.0\.7:PORT"),
        ("a" * 64, "cannot be a DNS name"),
        ("a..b", "cannot be a DNS name"),
    ],
)
def test_what_is_no_name_is_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DnsDiscovery(EngineRole.DECODE, name, 8081)
