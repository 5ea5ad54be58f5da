"""What a fleet knows: who is in use, which pairs work, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Origin
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.fleet import Fleet

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE


def engine(name: str, role: EngineRole) -> Engine:
    return Engine(f"http://{name}:1", role, Origin.parse(f"http://{name}:1"))


class Box:
    """A fleet with two prefillers and two decoders."""

    def __init__(self, **options: Any) -> None:
        self.fleet = Fleet(**options)
        self.p0, self.p1 = self.add("p0", PREFILL), self.add("p1", PREFILL)
        self.d0, self.d1 = self.add("d0", DECODE), self.add("d1", DECODE)

    def add(self, name: str, role: EngineRole) -> Engine:
        added = engine(name, role)
        self.fleet.add(added)
        return added

    def decoders_ready(self, *decoders: Engine) -> None:
        for decoder in decoders:
            self.fleet.prove(decoder, [])

    def prove(self, prefiller: Engine, decoder: Engine) -> bool:
        return self.fleet.prove_pair(prefiller, decoder, self.fleet.pair(prefiller, decoder))


@pytest.fixture
def box() -> Box:
    return Box()


def test_an_engine_is_not_in_use_until_it_is_proved(box: Box) -> None:
    assert box.fleet.ready(DECODE) == []
    box.decoders_ready(box.d1)
    assert box.fleet.ready(DECODE) == [box.d1]
    assert box.fleet.of(DECODE) == [box.d0, box.d1]
    assert box.fleet.ready(PREFILL) == []
    assert box.prove(box.p0, box.d1)
    assert box.fleet.ready(PREFILL) == [box.p0]


def test_a_prefiller_serves_only_decoders_that_have_read_its_kv(box: Box) -> None:
    box.decoders_ready(box.d0, box.d1)
    box.prove(box.p0, box.d0)
    box.prove(box.p1, box.d1)
    assert box.fleet.prefillers_for(box.d0).all == [box.p0]
    assert box.fleet.prefillers_for(box.d1).all == [box.p1]
    assert box.fleet.is_proved(box.p0, box.d0)
    assert not box.fleet.is_proved(box.p0, box.d1)


@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_a_lost_engine_takes_its_proofs_with_it(box: Box, lost: str) -> None:
    box.decoders_ready(box.d0, box.d1)
    for prefiller in (box.p0, box.p1):
        for decoder in (box.d0, box.d1):
            box.prove(prefiller, decoder)
    gone: Engine = getattr(box, lost)
    box.fleet.lost(gone, "gone")
    assert (gone.state, gone.why) == (State.WAITING, "gone")
    if gone is box.d0:
        box.decoders_ready(gone)  # back, and no pair of it is proved yet
    else:
        assert box.prove(gone, box.d1)  # back, and proved with one decoder
    assert box.fleet.prefillers_for(box.d0).all == ([] if lost == "d0" else [box.p1])
    assert box.fleet.prefillers_for(box.d1).all == [box.p0, box.p1]


@pytest.mark.parametrize("lost", ["p0", "d0"])
@pytest.mark.parametrize("how", ["lost", "lost and back", "removed"])
def test_a_proof_that_began_before_one_of_the_pair_was_lost_proves_nothing(
    box: Box, lost: str, how: str
) -> None:
    box.decoders_ready(box.d0, box.d1)
    begun = box.fleet.pair(box.p0, box.d0)
    gone: Engine = getattr(box, lost)
    if how == "removed":
        box.fleet.remove(gone)
    else:
        box.fleet.lost(gone, "gone")
    if how == "lost and back" and gone is box.d0:
        box.decoders_ready(gone)
    elif how == "lost and back":
        assert box.prove(gone, box.d1)
    assert not box.fleet.prove_pair(box.p0, box.d0, begun)
    assert not box.fleet.is_proved(box.p0, box.d0)
    assert box.fleet.prefillers_for(box.d0).all == []


def test_proofs_of_pairs_leave_no_lists_behind() -> None:
    """Hundreds of engines are tens of thousands of pairs, and each proof changes a list."""
    fleet = Fleet()
    prefillers = [engine(f"p{i}", PREFILL) for i in range(10)]
    decoders = [engine(f"d{i}", DECODE) for i in range(10)]
    for one in (*prefillers, *decoders):
        fleet.add(one)
    for decoder in decoders:
        fleet.prove(decoder, [{"id": "m"}])
    pairs = list(product(prefillers, decoders))
    pairs.sort(key=lambda pair: pair[1] is not decoders[0])  # the prefillers come into use
    others = pairs[10:]
    Random(1).shuffle(others)
    for pair in (*pairs[:10], *others):
        assert fleet.prove_pair(*pair, fleet.pair(*pair))
        # One for each decoder; those of decoders that have any; all decoders.
        assert len(fleet._lists) <= 2 * len(decoders) + 2
    assert len({id(fleet.prefillers_for(decoder)) for decoder in decoders}) == 1


def test_a_list_that_one_models_engines_no_longer_need_stays_while_those_of_others_do() -> None:
    fleet = Fleet()
    p0, p1 = engine("p0", PREFILL), engine("p1", PREFILL)
    d0, d1, d2, d3 = (engine(f"d{i}", DECODE) for i in range(4))
    for one in (p0, p1, d0, d1, d2, d3):
        fleet.add(one)
    for prefiller in (p0, p1):
        fleet.told(prefiller, [{"id": "m"}, {"id": "tuned"}])
    for decoder in (d0, d1, d2, d3):
        fleet.prove(decoder, [{"id": "m"}, *([{"id": "tuned"}] if decoder is d0 else [])])
    for pair in ((p0, d0), (p1, d1), (p0, d2), (p1, d0), (p0, d3)):
        assert fleet.prove_pair(*pair, fleet.pair(*pair))
    assert fleet.prefillers_for(d2) is fleet.prefillers_for(d3), "equal lists are one"


def test_an_engine_that_is_removed_is_forgotten(box: Box) -> None:
    box.decoders_ready(box.d0)
    box.prove(box.p0, box.d0)
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
    box.decoders_ready(box.d0, box.d1)
    box.p0.why = box.p1.why = "answers"
    assert box.fleet.missing == "no prefill engine is ready: http://p0:1: answers; http://p1:1: answers"
    box.prove(box.p1, box.d0)
    box.fleet.lost(box.d0, "gone")
    assert box.fleet.missing is not None, "the decoder that can read its KV is not ready"
    box.prove(box.p1, box.d1)
    assert box.fleet.missing is None


def test_what_is_not_proved_yet_is_listed(box: Box) -> None:
    box.decoders_ready(box.d0, box.d1)
    box.prove(box.p0, box.d0)
    box.p1.why = "answers"
    assert box.fleet.unproved == [
        "prefill http://p1:1: answers",
        "http://p0:1 with http://d1:1: no canary yet",
    ]
    box.prove(box.p0, box.d1)
    box.fleet.remove(box.p1)
    assert box.fleet.unproved == []


def test_without_prefillers_a_decoder_is_enough() -> None:
    fleet = Fleet()
    assert fleet.missing == "no decode engine is ready: none is known"
    decoder = engine("d", DECODE)
    fleet.add(decoder)
    fleet.prove(decoder, [])
    assert fleet.missing is None


def test_models_are_those_of_ready_decoders_each_once(box: Box) -> None:
    assert (box.fleet.models, box.fleet.model_ids) == ([], frozenset())
    assert box.fleet.group(None).max_model_len is None
    box.fleet.prove(box.d0, [{"id": "a", "max_model_len": 1}])
    box.fleet.prove(box.d1, [{"id": "a", "max_model_len": 2}, {"id": "b"}, {"object": "no id"}])
    assert [m["id"] for m in box.fleet.models] == ["a", "b"]
    assert box.fleet.model_ids == {"a", "b"}
    assert box.fleet.group(None).max_model_len == 2
    box.fleet.lost(box.d1, "gone")
    assert (box.fleet.model_ids, box.fleet.group(None).max_model_len) == ({"a"}, 1)


def test_a_request_is_in_flight_until_its_block_ends_in_whatever_way(box: Box) -> None:
    with box.d0.busy(), box.d0.busy():
        assert box.d0.in_flight == 2
    with pytest.raises(KeyError), box.d0.busy():
        raise KeyError
    assert box.d0.in_flight == 0


def test_tokens_are_pending_until_they_are_computed_or_the_block_ends(box: Box) -> None:
    with box.p0.busy(100) as computed, box.p0.busy(20):
        assert (box.p0.in_flight, box.p0.pending_tokens) == (2, 120)
        assert box.p0.pending_squares == 100**2 + 20**2
        computed()
        assert (box.p0.in_flight, box.p0.pending_tokens) == (2, 20)
        computed()  # once only
        assert (box.p0.pending_tokens, box.p0.pending_squares) == (20, 20**2)
    assert (box.p0.in_flight, box.p0.pending_tokens, box.p0.pending_squares) == (0, 0, 0)
    with pytest.raises(KeyError), box.p0.busy(7):
        raise KeyError
    assert (box.p0.pending_tokens, box.p0.pending_squares) == (0, 0)


def test_an_engine_in_use_that_is_lost_is_told_once_whoever_finds_out(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    box.decoders_ready(box.d0, box.d1)
    for _ in range(3):  # all requests that it had
        box.fleet.lost(box.d0, f"cannot be reached: {box.d0.url}: connection refused")
    assert [r.getMessage() for r in caplog.records] == [f"decode {box.d0.url} is lost: connection refused"]


def test_after_five_failures_in_a_row_an_engine_is_used_only_where_no_other_is_left(box: Box) -> None:
    box.decoders_ready(box.d0, box.d1)
    for _ in range(4):
        box.fleet.failed(box.d0)
    box.fleet.worked(box.d0)
    for _ in range(4):
        box.fleet.failed(box.d0)
    assert box.fleet.ready(DECODE) == [box.d0, box.d1]
    assert not box.d0.alarm.is_set()
    box.fleet.failed(box.d0)
    assert (box.d0.state, box.d0.why) == (State.SUSPECT, "5 requests failed in a row")
    assert box.d0.alarm.is_set(), "it is looked at now"
    assert box.fleet.ready(DECODE) == [box.d1]
    for _ in range(5):
        box.fleet.failed(box.d1)
    assert box.fleet.ready(DECODE) == [box.d0, box.d1], "some request must find out"
    assert len(box.fleet.unproved) == 4, "both suspects, and the prefillers"
    box.fleet.worked(box.d1)
    assert box.fleet.ready(DECODE) == [box.d1]


def test_a_suspect_prefiller_keeps_its_proofs_and_is_used_where_no_other_can_be(box: Box) -> None:
    box.decoders_ready(box.d0, box.d1)
    box.prove(box.p0, box.d0)
    box.prove(box.p1, box.d0)
    box.prove(box.p0, box.d1)
    for _ in range(5):
        box.fleet.failed(box.p0)
    assert box.fleet.prefillers_for(box.d0).all == [box.p1]
    assert box.fleet.prefillers_for(box.d1).all == [box.p0], "the only one that it can read"
    assert box.prove(box.p0, box.d1)
    assert box.p0.state is State.SUSPECT, "one pair is not all of them"
    box.fleet.worked(box.p0)
    assert box.fleet.prefillers_for(box.d0).all == [box.p0, box.p1]


def test_an_engine_that_is_out_of_use_is_not_made_suspect_and_comes_back_unsuspected(box: Box) -> None:
    for _ in range(9):
        box.fleet.failed(box.d0)
        box.fleet.failed(box.p0)
    assert box.d0.state is box.p0.state is State.WAITING
    box.fleet.worked(box.d0)
    assert box.d0.state is State.WAITING, "a request that went well there does not prove it"
    box.fleet.failed(box.d0)
    box.decoders_ready(box.d0)
    box.prove(box.p0, box.d0)
    for _ in range(4):
        box.fleet.failed(box.d0)
        box.fleet.failed(box.p0)
    assert box.fleet.prefillers_for(box.d0).all == [box.p0]
    assert box.d0.state is box.p0.state is State.READY
    for _ in range(5):
        box.fleet.failed(box.d0)
    box.fleet.lost(box.d0, "gone")
    assert box.d0.failures == 0


def test_who_asked_for_it_is_told_of_every_change_of_what_is_in_use(box: Box) -> None:
    told: list[list[str]] = []
    box.fleet.on_change(lambda: told.append([e.url for e in box.fleet.ready(DECODE)]))
    box.decoders_ready(box.d0)
    box.decoders_ready(box.d1)
    for _ in range(5):
        box.fleet.failed(box.d0)
    box.fleet.worked(box.d1)  # changes nothing
    box.fleet.worked(box.d0)
    box.fleet.lost(box.d1, "gone")
    d0, d1 = box.d0.url, box.d1.url
    assert told == [[d0], [d0, d1], [d1], [d0, d1], [d0]]


# Which pairs may meet (again)


def test_where_prefillers_find_restarted_decoders_all_may_meet(box: Box) -> None:
    box.decoders_ready(box.d0)
    box.prove(box.p0, box.d0)
    box.d0.identify(1.0)
    assert box.fleet.may_meet(box.p0, box.d0)


@pytest.fixture
def wary() -> Box:
    """With a connector whose prefillers do not find a decoder again that was restarted; all have met."""
    box = Box(survives_decoder_restart=False)
    for started, one in enumerate((box.p0, box.p1, box.d0, box.d1)):
        one.identify(float(started))
    box.decoders_ready(box.d0, box.d1)
    for prefiller in (box.p0, box.p1):
        for decoder in (box.d0, box.d1):
            assert box.fleet.may_meet(prefiller, decoder)
            box.prove(prefiller, decoder)
    return box


def back(box: Box, decoder: Engine, started: float | None) -> None:
    box.fleet.lost(decoder, "gone")
    decoder.identify(started)
    box.decoders_ready(decoder)


def test_a_decoder_that_was_only_away_may_be_met_again(wary: Box) -> None:
    back(wary, wary.d0, 2.0)
    assert wary.fleet.may_meet(wary.p0, wary.d0)


@pytest.mark.parametrize("started", [9.0, None], ids=["another process", "it does not say"])
def test_a_decoder_that_was_restarted_is_met_only_by_prefillers_that_were_too(
    wary: Box, started: float | None
) -> None:
    back(wary, wary.d0, started)
    assert not wary.fleet.may_meet(wary.p0, wary.d0)
    assert wary.fleet.may_meet(wary.p0, wary.d1)
    why = "the decode engine was restarted; restart the prefill engine, which cannot find it again"
    assert wary.fleet.unproved == [f"{p.url} with {wary.d0.url}: {why}" for p in (wary.p0, wary.p1)]
    wary.fleet.lost(wary.p0, "gone")
    wary.p0.identify(10.0)
    assert wary.fleet.may_meet(wary.p0, wary.d0)
    assert wary.prove(wary.p0, wary.d0)
    assert not wary.fleet.may_meet(wary.p1, wary.d0)
    assert wary.fleet.prefillers_for(wary.d0).all == [wary.p0]


def test_a_pair_is_spoilt_by_having_met_even_where_no_kv_went_across(wary: Box) -> None:
    """They shake hands before anything can fail."""
    back(wary, wary.d0, 9.0)
    third = wary.add("p2", PREFILL)
    third.identify(5.0)
    assert wary.fleet.may_meet(third, wary.d0)
    wary.fleet.pair(third, wary.d0)
    back(wary, wary.d0, 11.0)
    assert not wary.fleet.may_meet(third, wary.d0)


def test_engines_that_were_removed_are_no_longer_known_to_have_met(wary: Box) -> None:
    wary.fleet.remove(wary.d0)
    wary.d0.identify(9.0)
    assert wary.fleet.may_meet(wary.p0, wary.d0)


@dataclass
class Naive:
    """A fleet told in the plainest way: answers are worked out from the facts, each time."""

    members: list[Engine] = field(default_factory=list)
    ready: set[Engine] = field(default_factory=set)
    proved: set[tuple[Engine, Engine]] = field(default_factory=set)
    models: dict[Engine, list[dict[str, Any]]] = field(default_factory=dict)

    def by_url(self, role: EngineRole, among: Any) -> list[Engine]:
        return [e for e in sorted(self.members, key=lambda e: e.url) if e.role is role and e in among]

    def forget(self, gone: Engine) -> None:
        self.ready.discard(gone)
        self.proved = {p for p in self.proved if gone not in p}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "lost", "decoder", "begin", "end"]),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_fleet_answers_right_whatever_happened_to_it(steps: list[tuple[str, int, int]]) -> None:
    fleet, naive = Fleet(), Naive()
    engines = [engine(f"{role.value}{i}", role) for role in (DECODE, PREFILL) for i in (2, 0, 1)]
    begun: dict[tuple[Engine, Engine], tuple[int, int]] = {}
    spoilt: set[tuple[Engine, Engine]] = set()
    for step, i, j in steps:
        decoder, prefiller = engines[i], engines[3 + j]
        chosen = engines[i + 3 * (j % 2)]
        pair = (prefiller, decoder)
        if step == "add" and chosen not in naive.members:
            fleet.add(chosen)
            naive.members.append(chosen)
        elif step in ("remove", "lost") and chosen in naive.members:
            if step == "remove":
                fleet.remove(chosen)
                naive.members.remove(chosen)
            else:
                fleet.lost(chosen, "lost")
            naive.forget(chosen)
            spoilt |= {p for p in begun if chosen in p}
        elif step == "decoder" and decoder in naive.members:
            naive.models[decoder] = [{"id": f"m{j}", "max_model_len": 10 * i + j}]
            fleet.prove(decoder, naive.models[decoder])
            naive.ready.add(decoder)
        elif step == "begin" and decoder in naive.ready and prefiller in naive.members:
            begun[pair] = fleet.pair(*pair)
            spoilt.discard(pair)
        elif step == "end" and pair in begun:
            holds = pair not in spoilt
            assert fleet.prove_pair(*pair, begun.pop(pair)) is holds
            if holds:
                naive.ready.add(prefiller)
                naive.proved.add(pair)
        decoders = naive.by_url(DECODE, naive.ready)
        cards = {m["id"]: m for d in decoders for m in naive.models[d]}
        assert fleet.ready(DECODE) == decoders
        assert fleet.ready(PREFILL) == naive.by_url(PREFILL, naive.ready)
        assert [fleet.of(r) for r in EngineRole] == [naive.by_url(r, naive.members) for r in EngineRole]
        for d in engines[:3]:
            readable = [p for p in naive.by_url(PREFILL, naive.ready) if (p, d) in naive.proved]
            assert fleet.prefillers_for(d).all == (readable if d in naive.ready else [])
            assert all(fleet.is_proved(p, d) is ((p, d) in naive.proved) for p in engines[3:])
        assert fleet.models == list(cards.values())
        assert fleet.model_ids == cards.keys()
        lengths = [m["max_model_len"] for d in decoders for m in naive.models[d]]
        assert fleet.group(None).max_model_len == max(lengths, default=None)
        serves = bool(decoders) and (
            not naive.by_url(PREFILL, naive.members) or any(d in naive.ready for _, d in naive.proved)
        )
        assert (fleet.missing is None) is serves
