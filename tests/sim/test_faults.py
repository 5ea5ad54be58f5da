"""The grammar of faults, and whom they strike."""

from __future__ import annotations

import pytest

from tandem.sim.faults import FaultError, Faults, leg_of, parse


@pytest.mark.parametrize(
    "text",
    [
        "hang",
        "hang@3",
        "delay=2.5@1",
        "status=503,times=2",
        "error@4,rate=0.5",
        "no-kv-params,leg=prefill",
        "slow=3",
        "refuse",
    ],
)
def test_what_is_read_is_written_the_same(text: str) -> None:
    assert [str(fault) for fault in parse(text, whole_engine=True)] == [text]


def test_several_stand_in_one_line() -> None:
    faults = parse("delay=1; reset@2 ;", whole_engine=False)
    assert [str(f) for f in faults] == ["delay=1", "reset@2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("explode", "'explode': is no kind of fault; there are badjson, crash"),
        ("delay", "delay needs value"),
        ("hang=3", "hang takes no value"),
        ("status=500@3", "status cannot stand at a chunk"),
        ("status=200", "400 to 599"),
        ("hang@x", "invalid literal"),
        ("hang@-1", "must not be negative"),
        ("hang,when=now", "options are times=N, rate=P and leg="),
        ("hang,leg=both", "options are"),
        ("slow=0", "greater than 0"),
    ],
)
def test_what_is_not_in_the_grammar_is_told(text: str, said: str) -> None:
    with pytest.raises(FaultError, match=said):
        parse(text, whole_engine=True)


@pytest.mark.parametrize("text", ["refuse", "slow=2"])
def test_some_are_for_whole_engines(text: str) -> None:
    with pytest.raises(FaultError, match="whole engine"):
        parse(text, whole_engine=False)


def engine(text: str) -> Faults:
    faults = Faults()
    faults.engine = parse(text, whole_engine=True)
    return faults


def test_times_counts_requests_and_stays_with_them() -> None:
    faults = engine("lost-kv,times=1")
    assert faults.due("lost-kv", "a", "decode")
    assert not faults.due("lost-kv", "b", "decode")
    assert faults.due("lost-kv", "a", "decode")


def test_a_rate_strikes_about_that_many_and_the_same_ones_again() -> None:
    faults = engine("hang,rate=0.25")
    struck = [bool(faults.of(f"r{i}", "alone")) for i in range(1000)]
    assert 200 < sum(struck) < 300
    assert struck == [bool(faults.of(f"r{i}", "alone")) for i in range(1000)]


def test_a_leg_is_told_by_kv_transfer_params() -> None:
    faults = engine("hang,leg=prefill")
    assert faults.of("r", leg_of({"do_remote_decode": True}))
    assert not faults.of("s", leg_of({"do_remote_prefill": True}))
    assert not faults.of("t", leg_of(None))
    assert faults.of("u", leg_of({"disagg_spec": {}, "lmcache.tag.req": "u"}))
    assert leg_of({"lmcache.tag.req": "u"}) == "decode"
    assert leg_of({"lmcache.skip_save": True}) == "alone"


def test_a_fault_has_a_value_while_it_is_due() -> None:
    faults = engine("late-notification=2,times=1")
    assert faults.value("late-notification", "a", "prefill") == 2
    assert faults.value("late-notification", "b", "prefill") == 0


def test_a_requests_own_faults_are_forgotten_with_it() -> None:
    faults = Faults()
    faults.bring("r", parse("hang", whole_engine=False))
    assert faults.of("r", "alone")
    assert not faults.of("s", "alone")
    faults.forget("r")
    assert not faults.of("r", "alone")


def test_the_earliest_comes_first() -> None:
    assert [str(f) for f in engine("reset@5;delay=1;hang@2").of("r", "alone")] == [
        "delay=1",
        "hang@2",
        "reset@5",
    ]
