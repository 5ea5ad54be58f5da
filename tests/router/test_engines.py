"""What a fleet knows: who is in use, which pairs work, and what is missing."""

from __future__ import annotations

import pytest

from tandem.http import Origin
from tandem.router.engines import Engine, EngineRole, Fleet, State

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE


class Box:
    """A fleet with two prefillers and two decoders."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.p0, self.p1 = self.add("p0", PREFILL), self.add("p1", PREFILL)
        self.d0, self.d1 = self.add("d0", DECODE), self.add("d1", DECODE)

    def add(self, name: str, role: EngineRole) -> Engine:
        engine = Engine(f"http://{name}:1", role, Origin.parse(f"http://{name}:1"))
        self.fleet.add(engine)
        return engine


@pytest.fixture
def box() -> Box:
    return Box()


def ready(*engines: Engine) -> None:
    for engine in engines:
        engine.state = State.READY


def test_an_engine_is_not_in_use_until_it_is_ready(box: Box) -> None:
    assert box.fleet.ready(DECODE) == []
    ready(box.d1)
    assert box.fleet.ready(DECODE) == [box.d1]
    assert box.fleet.of(DECODE) == [box.d0, box.d1]


def test_a_prefiller_serves_only_decoders_that_have_read_its_kv(box: Box) -> None:
    ready(box.p0, box.p1, box.d0, box.d1)
    box.fleet.prove(box.p0, box.d0)
    box.fleet.prove(box.p1, box.d1)
    assert box.fleet.prefillers_for(box.d0) == [box.p0]
    assert box.fleet.prefillers_for(box.d1) == [box.p1]
    assert box.fleet.is_proved(box.p0, box.d0)
    assert not box.fleet.is_proved(box.p0, box.d1)


@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_a_lost_engine_takes_its_proofs_with_it(box: Box, lost: str) -> None:
    ready(box.p0, box.p1, box.d0, box.d1)
    for prefiller in (box.p0, box.p1):
        for decoder in (box.d0, box.d1):
            box.fleet.prove(prefiller, decoder)
    engine: Engine = getattr(box, lost)
    box.fleet.lost(engine, "gone")
    assert (engine.state, engine.why) == (State.WAITING, "gone")
    ready(engine)  # back, and not proved yet
    assert box.fleet.prefillers_for(box.d0) == ([] if lost == "d0" else [box.p1])
    assert box.fleet.prefillers_for(box.d1) == ([box.p1] if lost == "p0" else [box.p0, box.p1])


def test_an_engine_that_is_removed_is_forgotten(box: Box) -> None:
    ready(box.p0, box.d0)
    box.fleet.prove(box.p0, box.d0)
    box.fleet.remove(box.p0)
    assert box.p0 not in box.fleet.engines
    assert not box.fleet.is_proved(box.p0, box.d0)
    again = box.add("p0", PREFILL)
    assert not box.fleet.is_proved(again, box.d0)


def test_what_is_missing_is_told_engine_by_engine(box: Box) -> None:
    box.d0.why = "cannot be reached"
    assert box.fleet.missing == (
        "no decode engine is ready: http://d0:1: cannot be reached; http://d1:1: not contacted yet"
    )
    ready(box.d1)
    box.p0.why = box.p1.why = "answers"
    assert box.fleet.missing == "no prefill engine is ready: http://p0:1: answers; http://p1:1: answers"
    ready(box.p1)
    assert box.fleet.missing is not None, "ready alone, without a decoder that can read its KV"
    box.fleet.prove(box.p1, box.d0)
    assert box.fleet.missing is not None, "that decoder is not ready"
    box.fleet.prove(box.p1, box.d1)
    assert box.fleet.missing is None


def test_what_is_not_proved_yet_is_listed(box: Box) -> None:
    ready(box.p0, box.d0, box.d1)
    box.fleet.prove(box.p0, box.d0)
    box.p1.why = "answers"
    assert box.fleet.unproved == [
        "prefill http://p1:1: answers",
        "http://p0:1 with http://d1:1: no canary yet",
    ]
    box.fleet.prove(box.p0, box.d1)
    box.fleet.remove(box.p1)
    assert box.fleet.unproved == []


def test_without_prefillers_a_decoder_is_enough() -> None:
    fleet = Fleet()
    assert fleet.missing == "no decode engine is ready: none is configured"
    decoder = Engine("http://d:1", DECODE, Origin.parse("http://d:1"))
    fleet.add(decoder)
    ready(decoder)
    assert fleet.missing is None


def test_models_are_those_of_ready_decoders_each_once(box: Box) -> None:
    box.d0.models = [{"id": "a", "max_model_len": 1}]
    box.d1.models = [{"id": "a", "max_model_len": 2}, {"id": "b"}, {"object": "no id"}]
    box.p0.models = [{"id": "prefiller's"}]
    assert box.fleet.models == []
    ready(box.p0, box.d0, box.d1)
    assert [m["id"] for m in box.fleet.models] == ["a", "b"]


def test_a_request_is_in_flight_until_its_block_ends_in_whatever_way(box: Box) -> None:
    with box.d0.busy(), box.d0.busy():
        assert box.d0.in_flight == 2
    with pytest.raises(KeyError), box.d0.busy():
        raise KeyError
    assert box.d0.in_flight == 0
