"""Which engines may serve a request: ramp-up, who answers, who may hand KV to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Origin
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.fleet import Fleet
from tandem.router.groups import NOBODY, Candidates, answering, may_pair

PREFILL, DECODE, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH
RAMP = 16.0


def engine(name: str, role: EngineRole = DECODE, **facts: Any) -> Engine:
    url = f"http://{name}:1"
    return Engine(url, role, Origin.parse(url), **facts)


def cards(*names: str) -> list[dict[str, Any]]:
    return [{"id": name} for name in names]


# Ramp-up


@dataclass
class Ramp:
    """Engines that have been there for long, and engines that join them now (time 0)."""

    old: int
    new: int
    now: float = 0.0
    engines: list[Engine] = field(init=False)

    def __post_init__(self) -> None:
        joined = [-2 * RAMP] * self.old + [0.0] * self.new
        self.engines = [engine(f"e{i:03}", joined=time) for i, time in enumerate(joined)]
        self.candidates = Candidates(self.engines, RAMP, lambda: self.now)

    def load(self, *each: int) -> None:
        for one, load in zip(self.engines, each, strict=True):
            one.in_flight = load

    def takes(self, which: int) -> bool:
        return self.engines[which] in self.candidates.now()

    def room(self) -> int:
        """How many requests the last engine may have now, the first that it is refused at."""
        newest = self.engines[-1]
        for load in range(10_000):
            newest.in_flight = load
            if newest not in self.candidates.now():
                newest.in_flight = 0
                return load
        raise AssertionError("it is not bounded")


def test_the_share_of_a_new_engine_grows_until_it_is_one_of_all() -> None:
    ramp = Ramp(old=4, new=1)
    ramp.load(160, 150, 170, 160, 0)
    rooms = []
    for second in range(int(RAMP)):
        ramp.now = float(second)
        rooms.append(ramp.room())
    assert rooms == [1, *range(10, 160, 10)]
    ramp.now = RAMP
    ramp.load(1, 1, 1, 1, 1000)
    assert ramp.takes(-1), "from then on it is the strategy's business"
    assert ramp.candidates.now() is ramp.candidates.all


def test_a_new_engine_may_always_have_one_request_and_no_more_than_the_others_have() -> None:
    ramp = Ramp(old=2, new=1, now=RAMP / 2)
    for idle in (0, 1):
        ramp.load(idle, idle, 0)
        assert ramp.room() == 1
    ramp.load(6, 2, 0)
    assert ramp.room() == 2


def test_an_engine_that_another_computes_prompts_for_has_those_requests_too() -> None:
    ramp = Ramp(old=1, new=1)
    ramp.engines[1].held = 1
    assert not ramp.takes(1)


def test_engines_that_are_all_new_share_at_once() -> None:
    """At a router's start nobody is there who could take the rest."""
    ramp = Ramp(old=0, new=3)
    ramp.load(50, 0, 0)
    assert ramp.candidates.now() is ramp.candidates.all


def test_without_ramp_up_a_new_engine_is_like_all() -> None:
    ramp = Ramp(old=2, new=1)
    ramp.load(0, 0, 50)
    assert Candidates(ramp.engines, 0.0, lambda: 0.0).now() == ramp.engines


def test_lists_stay_the_same_objects_while_nothing_changes() -> None:
    ramp = Ramp(old=2, new=2)
    assert ramp.candidates.now() is ramp.candidates.all
    ramp.load(4, 4, 1, 0)
    without = ramp.candidates.now()
    assert without == [*ramp.engines[:2], ramp.engines[3]]
    ramp.load(9, 4, 1, 0)
    assert ramp.candidates.now() is without
    ramp.load(9, 4, 0, 0)
    assert ramp.candidates.now() is ramp.candidates.all
    ramp.load(9, 4, 1, 0)
    assert ramp.candidates.now() is without


def test_many_that_join_at_once_do_not_make_lists_without_end() -> None:
    ramp = Ramp(old=1, new=9)
    for number in range(512):
        ramp.load(9, *(number >> bit & 1 for bit in range(9)))
        expected = [e for e in ramp.engines if e.in_flight != 1]
        assert ramp.candidates.now() == expected
    assert len(ramp.candidates._kept) < 100


def test_many_engines_are_not_listed_anew_for_each_question() -> None:
    ramp = Ramp(old=8, new=56)
    lists: list[list[Engine]] = [ramp.candidates.all]
    for number in range(160):
        ramp.load(*[9] * 8, *(number >> bit & 1 for bit in range(8)), *[0] * 48)
        chosen = ramp.candidates.now()
        if all(chosen is not known for known in lists):
            lists.append(chosen)
    assert 10 <= len(lists) <= 1 + 160 / 8, "loads change for each, lists for every eighth"


def test_the_part_of_its_ramp_up_that_is_over_is_told() -> None:
    ramp = Ramp(old=2, new=1)
    shares = []
    for ramp.now in (0.0, RAMP / 4, RAMP / 2, RAMP, 2 * RAMP):
        ramp.candidates.now()
        shares.append([ramp.candidates.share(each) for each in ramp.engines])
    assert shares == [[1, 1, 0], [1, 1, 0.25], [1, 1, 0.5], [1, 1, 1], [1, 1, 1]]
    alike = Ramp(old=0, new=2)
    assert [alike.candidates.share(each) for each in alike.engines] == [1, 1], "they share at once"


@given(
    old=st.integers(0, 10),  # of more, lists are a few questions old
    joined=st.lists(st.floats(0, 9), max_size=5),
    loads=st.lists(st.integers(0, 30), min_size=25, max_size=25),
    times=st.lists(st.floats(0, 25), min_size=1, max_size=5),
)
def test_whatever_the_loads_those_that_are_there_for_long_may_be_chosen(
    old: int, joined: list[float], loads: list[int], times: list[float]
) -> None:
    engines = [engine(f"e{i:03}", joined=-RAMP) for i in range(old)]
    engines += [engine(f"n{i:03}", joined=time) for i, time in enumerate(joined)]
    if not engines:
        return
    for one, load in zip(engines, loads, strict=False):
        one.in_flight = load
    now = 9.0
    candidates = Candidates(engines, RAMP, lambda: now)
    for now in sorted(9.0 + time for time in times):
        chosen = candidates.now()
        assert chosen, "somebody may always be chosen"
        assert chosen == [e for e in engines if e in chosen], "in order, each once"
        assert set(engines[:old]) <= set(chosen)
        assert {e for e in engines if e.in_flight == 0} <= set(chosen)
        assert candidates.now() is chosen
        if all(now - time >= RAMP for time in joined) or not old:
            assert chosen is engines


def test_a_fleet_ramps_up_who_joins_it_and_who_comes_back() -> None:
    now = 0.0
    fleet = Fleet(ramp_up=RAMP, clock=lambda: now)
    first, second = engine("a"), engine("b")
    for one in (first, second):
        fleet.add(one)
    fleet.prove(first, [])
    fleet.prove(second, [])
    second.held = 5
    assert fleet.group(None).decoders.now() == [first, second], "both are new"
    now = 50.0
    fleet.lost(second, "gone")
    second.held = 0
    fleet.prove(second, [])
    first.held, second.held = 4, 1
    assert fleet.group(None).decoders.now() == [first]
    now = 58.0
    assert fleet.group(None).decoders.now() == [first, second]
    second.held = 3
    assert fleet.group(None).decoders.now() == [first]
    now = 66.0
    assert fleet.group(None).decoders.now() == [first, second]


def test_a_fleet_tells_the_part_of_each_engines_ramp_up_that_is_over() -> None:
    now = 0.0
    fleet = Fleet(ramp_up=RAMP, clock=lambda: now)
    d0, d1, d2 = (engine(name) for name in ("d0", "d1", "d2"))
    p0, p1 = engine("p0", PREFILL), engine("p1", PREFILL)
    for one in (d0, d1, d2, p0, p1):
        fleet.add(one)
    fleet.prove(d0, cards("a"))
    fleet.prove_pair(p0, d0, fleet.pair(p0, d0))
    assert fleet.ramp_up(d0) == fleet.ramp_up(p0) == 1, "the first take all at once"
    now = 50.0
    fleet.prove(d1, cards("a"))
    fleet.prove(d2, cards("b"))
    fleet.prove_pair(p1, d0, fleet.pair(p1, d0))
    now += RAMP / 4
    assert [fleet.ramp_up(e) for e in (d0, d1, d2, p0, p1)] == [1, 0.25, 1, 1, 0.25]
    now += RAMP
    assert {fleet.ramp_up(e) for e in fleet.engines} == {1}


def test_an_engine_that_was_only_suspect_does_not_ramp_up_again() -> None:
    now = 0.0
    fleet = Fleet(ramp_up=RAMP, clock=lambda: now, suspect_after=1)
    first, second = engine("a"), engine("b")
    for one in (first, second):
        fleet.add(one)
        fleet.prove(one, [])
    now = 50.0
    fleet.failed(second)
    fleet.worked(second)
    second.held = 9
    assert fleet.group(None).decoders.now() == [first, second]


# Lists of a fleet


def test_a_fleet_hands_out_the_same_lists_until_something_changes() -> None:
    fleet = Fleet()
    members = {name: engine(name, PREFILL if name[0] == "p" else DECODE) for name in ("p0", "p1", "d0", "d1")}
    for member in members.values():
        fleet.add(member)
    for name in ("d0", "d1"):
        fleet.prove(members[name], cards("a"))
    for prefiller in ("p0", "p1"):
        for decoder in ("d0", "d1"):
            pair = members[prefiller], members[decoder]
            fleet.prove_pair(*pair, fleet.pair(*pair))
    group = fleet.group("a")
    assert group is fleet.group("a")
    assert group.decoders.now() is group.decoders.now() is fleet.group(None).decoders.all
    assert group.pairable is group.decoders, "equal lists are one"
    assert group.prefillers[members["d0"]] is group.prefillers[members["d1"]]
    for each in members.values():
        fleet.worked(each)  # changes nothing
    assert fleet.group("a") is group
    fleet.told(members["p0"], [])
    assert fleet.group("a") is group, "it told nothing new"
    fleet.lost(members["p1"], "gone")
    assert fleet.group("a") is not group
    assert fleet.group("a").prefillers[members["d0"]].all == [members["p0"]]


def test_nobody_is_no_candidate() -> None:
    assert not NOBODY
    assert NOBODY.now() == []
    assert Fleet().group(None).decoders.now() == []


# Who answers


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"d": "ready", "e": "ready"}, "d"),
        ({"d": "waiting", "e": "ready"}, "e"),
        ({"d": "suspect", "e": "ready"}, "e"),
        ({"d": "suspect", "e": "suspect"}, "d"),
        ({"d": "waiting", "e": "suspect"}, "e"),
        ({"d": "suspect", "d2": "ready", "e": "ready"}, "d2"),
        ({"d": "waiting", "e": "waiting"}, ""),
        ({"p": "ready", "e": "ready"}, "e"),
    ],
)
def test_decode_engines_answer_and_engines_without_a_role_where_none_of_them_can(
    states: Mapping[str, str], expected: str
) -> None:
    roles = {"d": DECODE, "e": BOTH, "p": PREFILL}
    engines = [engine(name, roles[name[0]], state=State(state)) for name, state in states.items()]
    assert [e.origin.authority.split(":")[0] for e in answering(engines)] == expected.split()


ROLES_AND_STATES = st.lists(st.tuples(st.sampled_from(EngineRole), st.sampled_from(State)), max_size=8)


@given(ROLES_AND_STATES)
def test_those_that_answer_are_alike_and_somebody_answers_where_anybody_can(
    facts: list[tuple[EngineRole, State]],
) -> None:
    engines = [engine(f"e{i}", role, state=state) for i, (role, state) in enumerate(facts)]
    found = answering(engines)
    usable = [e for e in engines if e.role is not PREFILL and e.state is not State.WAITING]
    assert bool(found) is bool(usable)
    assert len({(e.role, e.state) for e in found}) <= 1
    if any(e.state is State.READY for e in usable):
        assert all(e.state is State.READY for e in found)


# Who may hand KV to whom


@pytest.mark.parametrize(
    ("prefiller", "decoder", "may"),
    [
        ({}, {}, True),
        ({"zone": "a"}, {"zone": "a"}, True),
        ({"zone": "a"}, {"zone": "b"}, False),
        ({"zone": "a"}, {}, True),
        ({}, {"zone": "b"}, True),
        ({"zone": "a", "tp": "2"}, {"zone": "a", "tp": "4"}, False),
        ({"rack": "1"}, {"rack": "2"}, True),
        ({"zone": ""}, {"zone": "b"}, False),
    ],
)
def test_a_pair_agrees_in_the_labels_that_matter_and_both_have(
    prefiller: dict[str, str], decoder: dict[str, str], may: bool
) -> None:
    pair = engine("p", PREFILL, labels=prefiller), engine("d", DECODE, labels=decoder)
    assert may_pair(*pair, ("zone", "tp")) is may


@pytest.mark.parametrize(
    ("prefiller", "decoder", "may"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("", "b", True),  # it has not told yet
        ("a", "", True),
        ("a alias", "alias b", True),
    ],
)
def test_a_pair_serves_a_model_in_common(prefiller: str, decoder: str, may: bool) -> None:
    p = engine("p", PREFILL, models=cards(*prefiller.split()))
    d = engine("d", DECODE, models=cards(*decoder.split()))
    assert may_pair(p, d, ("zone",)) is may


LABELS = st.dictionaries(st.sampled_from(["zone", "tp", "rack"]), st.sampled_from("ab"))
MODELS = st.lists(st.sampled_from(["m", "n", "o"]), unique=True)


@given(LABELS, LABELS, MODELS, MODELS, st.sets(st.sampled_from(["zone", "tp"])))
def test_who_may_pair_is_symmetric_and_each_further_label_can_only_part(
    ours: dict[str, str], theirs: dict[str, str], our_models: list[str], their_models: list[str], by: set[str]
) -> None:
    p = engine("p", PREFILL, labels=ours, models=cards(*our_models))
    d = engine("d", DECODE, labels=theirs, models=cards(*their_models))
    may = may_pair(p, d, sorted(by))
    assert may is may_pair(d, p, sorted(by))
    if may:
        assert all(may_pair(p, d, sorted(by - {name})) for name in by)
        assert not our_models or not their_models or set(our_models) & set(their_models)
    expected = all(ours[n] == theirs[n] for n in by & ours.keys() & theirs.keys())
    told = bool(our_models and their_models)
    assert may is (expected and (not told or bool(set(our_models) & set(their_models))))


def test_a_fleet_lists_the_pairs_that_may_be_and_no_others() -> None:
    fleet = Fleet(pairing=("zone",))
    p = engine("p", PREFILL, labels={"zone": "a"})
    near, far = engine("near", labels={"zone": "a"}), engine("w-far", labels={"zone": "b"})
    for member in (p, near, far):
        fleet.add(member)
    for decoder in (near, far):
        fleet.prove(decoder, cards("m"))
    assert fleet.prove_pair(p, near, fleet.pair(p, near))
    assert fleet.unproved == []
    assert fleet.group(None).pairable.all == [near]
    assert fleet.group(None).decoders.all == [near, far]
    fleet.lost(near, "gone")
    assert fleet.missing == f"no prefill engine is ready: {p.url}: with {far.url}: labels or models differ"


# Who serves which model


def named(fleet: Fleet, model: str | None) -> dict[str, Any]:
    group = fleet.group(model)
    return {
        "decoders": [e.origin.authority.split(":")[0] for e in group.decoders.all],
        "pairable": [e.origin.authority.split(":")[0] for e in group.pairable.all],
        "prefillers": sorted(
            {e.origin.authority.split(":")[0] for c in group.prefillers.values() for e in c.all}
        ),
        "exist": group.prefillers_exist,
    }


def fleet_of(**serves: str) -> tuple[Fleet, dict[str, Engine]]:
    """Engines by name (its first letter is the role), and their models; every pair is proved that may be."""
    fleet = Fleet()
    roles = {"d": DECODE, "e": BOTH, "p": PREFILL}
    members = {name: engine(name, roles[name[0]]) for name in serves}
    for member in members.values():
        fleet.add(member)
    for name, models in serves.items():
        if members[name].answers:
            fleet.prove(members[name], cards(*models.split()))
        else:
            fleet.told(members[name], cards(*models.split()))
    for p in fleet.of(PREFILL):
        for d in fleet.of(DECODE):
            if fleet.may_pair(p, d):
                fleet.prove_pair(p, d, fleet.pair(p, d))
    return fleet, members


def test_each_model_has_the_engines_that_serve_it() -> None:
    fleet, _ = fleet_of(p0="a", p1="b", d0="a", d1="b", d2="a b", e0="c")
    assert named(fleet, "a") == {
        "decoders": ["d0", "d2"], "pairable": ["d0", "d2"], "prefillers": ["p0"], "exist": True
    }  # fmt: skip
    assert named(fleet, "b") == {
        "decoders": ["d1", "d2"], "pairable": ["d1", "d2"], "prefillers": ["p1"], "exist": True
    }  # fmt: skip
    assert named(fleet, "c") == {"decoders": ["e0"], "pairable": [], "prefillers": [], "exist": False}
    assert fleet.group("nobody's") is fleet.group(None)
    assert [e.url for e in fleet.answering] == [f"http://{n}:1" for n in ("d0", "d1", "d2", "e0")]


def test_a_prefiller_that_lacks_an_adapter_gets_none_of_its_requests() -> None:
    """Both pairs share the base model, and KV goes across; the adapter's prompts it could not compute."""
    fleet, _ = fleet_of(p0="m", p1="m lora", d0="m lora", d1="m")
    assert named(fleet, "m")["prefillers"] == ["p0", "p1"]
    assert named(fleet, "lora") == {
        "decoders": ["d0"], "pairable": ["d0"], "prefillers": ["p1"], "exist": True
    }  # fmt: skip


def test_a_model_none_of_whose_engines_is_in_use_is_not_served_by_those_of_others() -> None:
    fleet, members = fleet_of(d0="a", d1="b")
    fleet.lost(members["d0"], "gone")
    assert named(fleet, "a")["decoders"] == []
    assert named(fleet, "b")["decoders"] == ["d1"]
    assert fleet.model_ids == {"b"}
    assert fleet.names == {"a", "b"}
    assert fleet.parted, "who names no model would get another one's answer meanwhile"
    fleet.remove(members["d0"])
    assert fleet.names == {"b"}
    assert not fleet.parted


@pytest.mark.parametrize(
    ("serves", "parted"),
    [
        ({"d0": "a", "d1": "a"}, False),
        ({"d0": "a lora", "d1": "a"}, False),
        ({"d0": "a", "d1": "b"}, True),
        ({"d0": "a x", "d1": "b x"}, False),
        ({"d0": "a x", "d1": "b x", "e0": "c"}, True),
        ({"d0": "a", "p0": "b"}, False),
        ({}, False),
    ],
)
def test_a_request_has_to_name_its_model_where_no_name_is_everybodys(
    serves: dict[str, str], parted: bool
) -> None:
    fleet, _ = fleet_of(**serves)
    assert fleet.parted is parted


SERVES = st.dictionaries(
    st.sampled_from(["p0", "p1", "d0", "d1", "d2", "e0"]),
    st.sets(st.sampled_from(["a", "b", "c"]), min_size=1).map(lambda names: " ".join(sorted(names))),
)


@given(SERVES, st.lists(st.sampled_from(["p0", "p1", "d0", "d1", "d2", "e0"]), unique=True))
def test_a_models_group_has_nobody_that_does_not_serve_it(serves: dict[str, str], lost: list[str]) -> None:
    fleet, members = fleet_of(**serves)
    for name in lost:
        if name in members:
            fleet.lost(members[name], "gone")
    for model in fleet.names:
        group = fleet.group(model)
        engines = [*group.decoders.all, *group.pairable.all, *group.prefillers]
        engines += [p for known in group.prefillers.values() for p in known.all]
        assert all(model in e.model_ids and e.state is State.READY for e in engines)
        for d in group.pairable.all:
            assert group.prefillers[d].all
            assert all(fleet.is_proved(p, d) for p in group.prefillers[d].all)
        assert set(group.decoders.all) <= set(fleet.answering)
        assert bool(group.decoders) is (model in fleet.model_ids)
