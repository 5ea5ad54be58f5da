"""Proof before traffic: which engines and pairs a fleet may use, and when it stops using them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.config import RouterConfig
from tandem.http import Client, Request, Responder, serve
from tandem.router.budgets import Budgets
from tandem.router.canary import Prober
from tandem.router.connectors import Nixl
from tandem.router.counting import Counter
from tandem.router.discovery import Discovery, Member
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.fleet import Fleet
from tandem.router.handover import Handovers
from tandem.router.legs import Legs
from tandem.router.notifications import Notifications

from .fakes import JSON, FakeEngine, Seen, completion, engines, eventually, reads_kv

PATIENCE = 0.05


@dataclass
class Subject(FakeEngine):
    """A fake engine whose health and canaries can be made to fail or to take their time."""

    health: str = "fine"
    models: bytes | None = None
    hold: asyncio.Event | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    visits: int = 0
    pages: int = 0
    """How often it was asked for its metrics."""

    async def _answer(self, request: Request, responder: Responder) -> None:
        match request.path:
            case "/health":
                self.visits += 1
                if self.health == "hangs":
                    await asyncio.Event().wait()
                if self.health == "fails":
                    responder.send(503, JSON, b"{}")
                    return
            case "/metrics":
                self.pages += 1
            case "/v1/models" if self.models is not None:
                responder.send(200, JSON, self.models)
                return
            case "/v1/completions" if self.hold is not None:
                self.held.set()
                await self.hold.wait()
        await super()._answer(request, responder)

    async def die(self) -> None:
        assert self.server is not None
        await self.server.close()

    async def come_back(self) -> None:
        """At the same address."""
        assert self.server is not None
        self.server = await serve(self, "127.0.0.1", self.server.port)


class HastyLegs(Legs):
    """Legs that lose patience soon with an engine that is silent when asked for its health."""

    async def call(self, engine: Engine, method: str, path: str, *rest: Any, **options: Any) -> bytes:
        if path == "/health":
            options["head_timeout"] = PATIENCE
        return await super().call(engine, method, path, *rest, **options)


class BrokenLegs(Legs):
    """Legs with a mistake of ours in them, until it is mended."""

    mended = False

    async def call(self, engine: Engine, method: str, path: str, *rest: Any, **options: Any) -> bytes:
        if path == "/v1/models" and not self.mended:
            raise ZeroDivisionError
        return await super().call(engine, method, path, *rest, **options)


class Members(Discovery):
    """A discovery source whose members a test sets."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[frozenset[Member] | Exception] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        while True:
            change = await self.changes.get()
            if isinstance(change, Exception):
                raise change
            yield change


class Probed:
    """A prober at work on fake engines, and the fleet that it keeps."""

    def __init__(self, prefill: int = 1, decode: int = 1, legs: type[Legs] = Legs) -> None:
        self.prefill = [Subject(f"p{i}") for i in range(prefill)]
        self.decode = [Subject(f"d{i}") for i in range(decode)]
        self.members = Members()
        self.fleet = Fleet()
        self.client = Client()
        self.legs = legs(self.client, RouterConfig(decode=("http://127.0.0.1:1",)))

    def announce(self, *extra: Member, without: Subject | None = None) -> None:
        prefill = [Member(e.url, EngineRole.PREFILL) for e in self.prefill if e is not without]
        decode = [Member(e.url, EngineRole.DECODE) for e in self.decode if e is not without]
        self.members.changes.put_nowait(frozenset([*prefill, *decode, *extra]))

    def of(self, subject: Subject) -> Engine:
        return next(e for e in self.fleet.engines if e.url == subject.url)

    def ready(self, subject: Subject) -> bool:
        return any(e.url == subject.url and e.state is State.READY for e in self.fleet.engines)

    def pairs(self) -> set[tuple[str, str]]:
        """Prefiller and decoder of each pair that may be used."""
        names = {s.url: s.name for s in (*self.prefill, *self.decode)}
        ready = self.fleet.ready(EngineRole.DECODE)
        return {(names[p.url], names[d.url]) for d in ready for p in self.fleet.prefillers_for(d).all}


@pytest.fixture
async def probe() -> AsyncIterator[Callable[..., Any]]:
    """Start a prober: `await probe(Probed(prefill=2))`; engines may be changed before."""
    async with AsyncExitStack() as stack:

        async def start(
            probed: Probed, *, ready_interval: float = 0.002, waiting_interval: float = 0.001
        ) -> Probed:
            await stack.enter_async_context(engines(*probed.prefill, *probed.decode))
            stack.push_async_callback(probed.client.aclose)
            prober = Prober(
                probed.members,
                probed.fleet,
                probed.legs,
                Counter(None, probed.legs, probed.fleet),
                Handovers(Nixl(), probed.legs, probed.fleet, Notifications(), notification_timeout=1.0),
                Budgets(),
                waiting_interval=waiting_interval,
                ready_interval=ready_interval,
                canary_timeout=5.0,
            )
            running = asyncio.create_task(prober.run())

            async def stop() -> None:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

            stack.push_async_callback(stop)
            probed.announce()
            return probed

        yield start


async def until(holds: Callable[[], object]) -> None:
    async def now() -> bool:
        return bool(holds())

    await eventually(now)


async def visited(subject: Subject, times: int = 3) -> None:
    """Until an engine has been looked at a few times more."""
    then = subject.visits + times
    await until(lambda: subject.visits >= then)


async def test_engines_are_used_once_a_canary_has_gone_through_each_path(probe: Any) -> None:
    probed = Probed(prefill=2, decode=2)
    await probe(probed)
    await until(lambda: len(probed.pairs()) == 4)
    assert probed.fleet.missing is None
    for decoder in probed.decode:
        alone = [s for s in decoder.seen if s.kv is None]
        assert len(alone) == 1
        assert len([s for s in decoder.seen if reads_kv(s)]) == 2


async def test_the_log_names_engines_that_leave(probe: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    probed = Probed(prefill=1, decode=2)
    await probe(probed)
    await until(lambda: len(probed.pairs()) == 2)
    probed.announce(without=probed.decode[1])
    await until(lambda: len(probed.fleet.engines) == 2)
    told = [r.getMessage() for r in caplog.records if "left" in r.getMessage()]
    assert told == [f"engines left, and get no new requests: decode {probed.decode[1].url}"]


async def test_canaries_are_marked_short_and_never_the_same(probe: Any) -> None:
    probed = Probed(prefill=2, decode=2)
    await probe(probed)
    await until(lambda: len(probed.pairs()) == 4)
    seen = [s for e in (*probed.prefill, *probed.decode) for s in e.seen]
    assert all(s.is_canary and s.body["max_tokens"] == 1 and s.body["model"] == "m" for s in seen)
    starts = [s.body["prompt"] for e in probed.prefill for s in e.seen]
    assert len(set(starts)) == len(starts) == 4, "no cache may answer one"
    ids = [s.headers["x-request-id"] for s in seen]
    assert len(set(ids)) == len(ids)


async def test_what_is_proved_is_not_proved_again(probe: Any) -> None:
    """Each canary costs the engines work and KV blocks."""
    probed = Probed()
    await probe(probed)
    await until(probed.pairs)
    before = len(probed.decode[0].seen)
    for subject in (*probed.prefill, *probed.decode):
        await visited(subject, 5)
    assert len(probed.decode[0].seen) == before


NEVER = 3600.0
"""Seconds: an interval that no test waits for."""


async def test_a_prefiller_proves_itself_to_decoders_that_join_without_telling_its_metrics_again(
    probe: Any,
) -> None:
    """The page is large, and in a large fleet somebody joins all the time."""
    probed = Probed(decode=5)
    first, *others = probed.decode
    for decoder in others:
        decoder.health = "fails"
    await probe(probed, ready_interval=NEVER)
    await until(lambda: probed.pairs() == {("p0", first.name)})
    told = probed.prefill[0].pages
    for count, decoder in enumerate(others, 2):
        decoder.health = "fine"
        await until(lambda count=count: len(probed.pairs()) == count)
    assert probed.prefill[0].pages == told


async def test_a_prefiller_that_is_visited_all_the_time_tells_its_metrics_as_often_as_another(
    probe: Any,
) -> None:
    """One whose pair with a decoder cannot be proved is tried again soon."""
    probed = Probed(decode=2)
    (prefiller,), (decoder, _) = probed.prefill, probed.decode
    decoder.refuses = reads_kv
    await probe(probed, ready_interval=NEVER)
    await until(lambda: probed.pairs() == {("p0", "d1")})
    told = prefiller.pages
    await visited(prefiller)
    assert prefiller.pages == told


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_failed_a_request_is_seen_at_once_to_be_another_process_and_proved(
    probe: Any, role: str
) -> None:
    probed = Probed()
    (subject,) = getattr(probed, role)
    subject.metrics = b"process_start_time_seconds 1000\n"
    await probe(probed, ready_interval=NEVER, waiting_interval=NEVER)
    await until(probed.pairs)
    engine, canaries = probed.of(subject), len(subject.seen)
    subject.metrics = b"process_start_time_seconds 2000\n"
    engine.doubt()
    await until(lambda: engine.losses)
    await until(probed.pairs)
    assert engine.started == 2000
    assert len(subject.seen) > canaries, "it is proved anew"


async def test_a_decoder_that_fails_its_canary_gets_no_traffic_and_has_it_told(probe: Any) -> None:
    probed = Probed()
    probed.decode[0].refuses = lambda seen: True
    await probe(probed)
    await visited(probed.decode[0])
    assert not probed.ready(probed.decode[0])
    assert "/v1/completions answered HTTP 500" in (probed.fleet.missing or "")
    assert probed.prefill[0].seen == [], "a prefiller is proved with a decoder that works"
    probed.decode[0].refuses = lambda seen: False
    await until(probed.pairs)


async def test_a_prefiller_whose_kv_the_decoder_cannot_read_is_not_used(probe: Any) -> None:
    probed = Probed()
    probed.decode[0].refuses = reads_kv
    await probe(probed)
    await until(lambda: len([s for s in probed.decode[0].seen if reads_kv(s)]) > 2)
    assert probed.ready(probed.decode[0]), "it serves short prompts"
    assert not probed.ready(probed.prefill[0])
    assert probed.pairs() == set()
    why = f"{probed.decode[0].url} cannot read the KV of {probed.prefill[0].url}"
    assert why in (probed.fleet.missing or "")
    probed.decode[0].refuses = lambda seen: False
    await until(probed.pairs)


@pytest.mark.parametrize("which", [0, 1])
async def test_one_decoder_that_cannot_read_does_not_keep_a_prefiller_from_another(
    probe: Any, which: int
) -> None:
    probed = Probed(decode=2)
    await probe(probed)
    await until(lambda: len(probed.pairs()) == 2)
    (prefiller,) = probed.prefill
    first_tried = probed.fleet.ready(EngineRole.DECODE)[0].url
    good, bad = sorted(probed.decode, key=lambda d: (d.url == first_tried) is (which == 0))
    bad.refuses = reads_kv
    await prefiller.die()
    await until(lambda: not probed.ready(prefiller))
    await prefiller.come_back()
    await visited(prefiller, 5)
    assert probed.pairs() == {("p0", good.name)}


@pytest.mark.parametrize("params", [None, "missing"])
async def test_a_prefiller_that_hands_nothing_over_is_not_used(probe: Any, params: Any) -> None:
    class Mute(Subject):
        def prefill_reply(self, seen: Seen) -> dict[str, Any]:
            return completion("x") if params == "missing" else {**completion("x"), "kv_transfer_params": None}

    probed = Probed()
    probed.prefill = [Mute("p0")]
    await probe(probed)
    await visited(probed.prefill[0])
    assert probed.pairs() == set()
    assert "has no kv_transfer_params" in (probed.fleet.missing or "")


async def test_a_decoder_that_dies_and_comes_back_is_proved_anew_before_it_gets_traffic(probe: Any) -> None:
    probed = Probed()
    await probe(probed)
    await until(probed.pairs)
    (decoder,) = probed.decode
    await decoder.die()
    await until(lambda: not probed.ready(decoder))
    assert "cannot connect" in (probed.fleet.missing or "")
    assert probed.pairs() == set()

    decoder.hold = asyncio.Event()
    decoder.seen.clear()
    await decoder.come_back()
    await until(lambda: decoder.visits)
    await visited(probed.prefill[0])
    assert not probed.ready(decoder), "it is up, and its canary is not answered yet"
    decoder.hold.set()
    await until(probed.pairs)
    assert any(reads_kv(s) for s in decoder.seen), "the pair is proved anew too"


async def test_a_prefiller_that_dies_and_comes_back_is_proved_anew_before_it_gets_traffic(probe: Any) -> None:
    probed = Probed()
    await probe(probed)
    await until(probed.pairs)
    (prefiller,) = probed.prefill
    await prefiller.die()
    await until(lambda: not probed.pairs())
    assert probed.ready(probed.decode[0])
    prefiller.refuses = lambda seen: True
    await prefiller.come_back()
    await visited(prefiller)
    assert probed.pairs() == set()
    prefiller.refuses = lambda seen: False
    await until(probed.pairs)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_deep_in_work_that_does_not_answer_is_not_given_up(probe: Any, role: str) -> None:
    probed = Probed(legs=HastyLegs)
    await probe(probed)
    await until(probed.pairs)
    (subject,) = getattr(probed, role)
    subject.health = "hangs"
    await visited(subject)
    assert probed.ready(subject)
    assert probed.pairs() == {("p0", "d0")}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_says_it_is_not_well_is_not_used_until_it_is(probe: Any, role: str) -> None:
    probed = Probed()
    await probe(probed)
    await until(probed.pairs)
    (subject,) = getattr(probed, role)
    subject.health = "fails"
    await until(lambda: not probed.ready(subject))
    assert "/health answered HTTP 503" in (probed.fleet.missing or "")
    subject.seen.clear()
    subject.health = "fine"
    await until(probed.pairs)
    assert subject.seen, "it is proved anew"


@pytest.mark.parametrize("event", ["prefiller lost", "decoder lost", "decoder removed"])
async def test_a_pair_that_loses_an_engine_during_its_canary_is_not_proved(probe: Any, event: str) -> None:
    probed = Probed()
    (prefiller,), (decoder,) = probed.prefill, probed.decode
    prefiller.hold = asyncio.Event()
    await probe(probed)
    await prefiller.held.wait()
    decoder.hold, decoder.held = asyncio.Event(), asyncio.Event()
    prefiller.hold.set()
    await decoder.held.wait()  # it is asked to read the KV, and has not answered
    pair = probed.of(prefiller), probed.of(decoder)

    # Every later canary fails, so a proof could only come from this one.
    canary = prefiller.seen[-1].body["prompt"]
    prefiller.refuses = decoder.refuses = lambda seen: seen.body["prompt"] != canary
    if event == "decoder removed":
        probed.announce(without=decoder)
        await until(lambda: len(probed.fleet.engines) == 1)
    else:
        probed.fleet.lost(probed.of(decoder if event == "decoder lost" else prefiller), "lost by a request")
    decoder.hold.set()
    await until(lambda: any(s.body["prompt"] == canary for s in decoder.seen))
    await visited(prefiller)
    assert not probed.fleet.is_proved(*pair)
    assert probed.pairs() == set()
    assert not probed.ready(prefiller)


async def test_an_engine_that_does_not_answer_while_it_starts_is_waited_for(probe: Any) -> None:
    probed = Probed(legs=HastyLegs)
    probed.decode[0].health = "hangs"
    await probe(probed)
    await visited(probed.decode[0], 2)
    assert not probed.ready(probed.decode[0])
    probed.decode[0].health = "fine"
    await until(probed.pairs)


async def test_an_engine_that_names_no_model_is_not_used(probe: Any) -> None:
    probed = Probed()
    probed.decode[0].models = b'{"data": []}'
    await probe(probed)
    await visited(probed.decode[0])
    assert "/v1/models names no model" in (probed.fleet.missing or "")


ODD_MODELS = (
    b'"abc"',
    b"<html>",
    b"[1]",
    b"",
    b'{"data": [7]}',
    b'{"data": "m"}',
    b'{"data": [{}]}',
    b'{"data": [{"id": ""}]}',
    b'{"data": [{"id": ["m"], "parent": "m"}]}',
    b'{"data": [{"id": "m", "parent": 7}]}',
    b'{"data": [{"id": "m", "max_model_len": 0}]}',
    b'{"data": [{"id": "m", "max_model_len": "8k"}]}',
    b'{"data": [{"id": "m"}, {"id": null}]}',
)


@pytest.mark.parametrize("odd", ODD_MODELS)
async def test_an_engine_with_odd_models_harms_nobody_else_and_recovers(probe: Any, odd: bytes) -> None:
    probed = Probed(decode=2)
    bad, good = probed.decode
    sound, bad.models = bad.models, odd
    await probe(probed)
    await until(lambda: probed.ready(good))
    await visited(bad, 3)
    assert not probed.ready(bad)
    (why,) = {e.why for e in probed.fleet.engines if e.url == bad.url}
    assert "/v1/models is not a list of models" in why
    bad.models = sound
    await until(lambda: probed.ready(bad))


@pytest.mark.parametrize("odd", ODD_MODELS)
async def test_an_engine_in_use_whose_models_become_odd_keeps_those_it_told(probe: Any, odd: bytes) -> None:
    probed = Probed()
    await probe(probed)
    (decoder,) = probed.decode
    await until(lambda: probed.ready(decoder))
    decoder.models = odd
    await visited(decoder, 8)
    assert probed.ready(decoder)
    assert probed.fleet.models


async def test_a_mistake_of_ours_is_logged_and_the_probing_goes_on(
    probe: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = Probed(legs=BrokenLegs)
    await probe(probed)
    await visited(probed.decode[0])
    assert f"probing {probed.decode[0].url}" in caplog.text
    assert "the probe failed; see the router's log" in (probed.fleet.missing or "")
    monkeypatch.setattr(BrokenLegs, "mended", True)
    await until(probed.pairs)


async def test_an_engine_that_discovery_takes_away_is_used_and_looked_at_no_more(probe: Any) -> None:
    probed = Probed(decode=2)
    await probe(probed)
    await until(lambda: len(probed.pairs()) == 2)
    gone = probed.decode[0]
    probed.announce(without=gone)
    await until(lambda: all(e.url != gone.url for e in probed.fleet.engines))
    visits = gone.visits
    await visited(probed.decode[1])
    assert gone.visits <= visits + 1  # one may have been under way
    assert probed.pairs() == {("p0", "d1")}


async def test_discovery_that_fails_is_watched_again_and_what_is_known_stays_in_use(
    probe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    probed = Probed(decode=2)
    await probe(probed)
    await until(lambda: len(probed.pairs()) == 2)
    probed.members.changes.put_nowait(OSError("no such host"))
    await until(lambda: "discovery failed" in caplog.text)
    assert "no such host" in caplog.text
    assert len(probed.pairs()) == 2
    probed.announce(without=probed.decode[0])
    await until(lambda: probed.pairs() == {("p0", "d1")})


async def test_another_engine_at_the_same_address_is_proved_as_a_new_one(probe: Any) -> None:
    probed = Probed()
    await probe(probed)
    await until(probed.pairs)
    (decoder,) = probed.decode
    old, canaries = probed.of(decoder), len(decoder.seen)
    probed.announce(Member(decoder.url, EngineRole.DECODE, uid="second"), without=decoder)
    await until(lambda: old not in probed.fleet.engines and probed.pairs())
    assert len(decoder.seen) == canaries + 2


async def test_a_decoder_that_leaves_during_a_round_of_canaries_gets_none_of_them(probe: Any) -> None:
    """What a prefiller hands over to one that is gone lies there until its lease ends."""
    probed = Probed(decode=2)
    (prefiller,) = probed.prefill
    prefiller.health = "fails"
    await probe(probed)
    await until(lambda: all(map(probed.ready, probed.decode)))
    first, second = sorted(probed.decode, key=lambda d: d.url)
    prefiller.hold, prefiller.health = asyncio.Event(), "fine"
    await prefiller.held.wait()
    gone = probed.of(second)
    probed.announce(without=second)
    await until(lambda: gone not in probed.fleet.engines)
    prefiller.hold.set()
    await until(probed.pairs)
    await visited(prefiller)
    assert probed.pairs() == {("p0", first.name)}
    assert [len([s for s in d.seen if reads_kv(s)]) for d in (first, second)] == [1, 0]
    assert len(prefiller.seen) == 1
