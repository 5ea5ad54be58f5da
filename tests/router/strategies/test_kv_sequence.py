"""The order of a publisher's batches under losses, replays, time-outs and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.strategies.kv_sequence import Forget, Sequence


@dataclass
class Publisher:
    """Numbers its batches from 0 and keeps the last few. A batch is `life:number`.

    Of an answer it sends the first few, `room`, and then only what happens to find room: every third batch;
    the end is lost where `ends` is false.
    """

    keeps: int
    room: int = 1000
    ends: bool = True
    life: int = 0
    batches: list[bytes] = field(default_factory=list)

    def publish(self) -> tuple[int, bytes]:
        self.batches.append(b"%d:%d" % (self.life, len(self.batches)))
        return len(self.batches) - 1, self.batches[-1]

    def restart(self) -> None:
        self.life += 1
        self.batches.clear()

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        kept = list(enumerate(self.batches))[-self.keeps :]
        wanted = [each for each in kept if each[0] >= first]
        return wanted[: self.room] + wanted[self.room + 1 :: 3]


@dataclass
class Reader:
    """What a user of the sequence has after doing what it says."""

    known: list[bytes] = field(default_factory=list)
    complete: bool = False

    def read(self, sequence: Sequence) -> None:
        while sequence.out:
            item = sequence.out.popleft()
            if isinstance(item, Forget):
                self.known, self.complete = [], item.complete
            else:
                self.known.append(item)


def answer(sequence: Sequence, publisher: Publisher) -> None:
    """Replays until none is wanted; many more than there are batches would be a loop."""
    for _ in range(5 + len(publisher.batches)):
        if sequence.ask is None:
            return
        for number, payload in publisher.replay(sequence.ask):
            sequence.replayed(number, payload)
        if publisher.ends or sequence.replay_is_over:
            sequence.replay_ended()
        else:
            sequence.replay_failed()
    raise AssertionError("asks again and again")


STEPS = st.lists(
    st.sampled_from(["live"] * 6 + ["missed"] * 2 + ["restart", "answer", "time-out", "check"]), max_size=40
)


@settings(max_examples=500)
@given(STEPS, st.integers(1, 30), st.integers(2, 10), st.booleans(), st.booleans())
def test_what_is_known_is_always_one_unbroken_end_of_one_life(
    steps: list[str], keeps: int, room: int, ends: bool, replays: bool
) -> None:
    """And all of it, where it is said to be complete."""
    publisher, sequence, reader = Publisher(keeps, room, ends), Sequence(replays=replays), Reader()
    restarted = False
    for step in [*steps, "live", "answer"]:
        if step == "live":
            number, payload = publisher.publish()
            sequence.live(number, payload)
        elif step == "missed":
            publisher.publish()
        elif step == "restart":
            publisher.restart()
            restarted = True
        elif step == "answer":
            answer(sequence, publisher)
        elif step == "check":
            sequence.check()
        elif sequence.ask is not None:
            sequence.replay_failed()
        reader.read(sequence)
        lives = {b.partition(b":")[0] for b in reader.known}
        numbers = [int(b.partition(b":")[2]) for b in reader.known]
        # One case cannot be told: a restart of which just as many batches were missed as had been seen.
        # Routers hear of restarts from their canaries as well (`restarted`).
        if not restarted:
            assert len(lives) <= 1
        assert numbers == list(
            range(numbers[0] if numbers else 0, numbers[0] + len(numbers) if numbers else 0)
        )
        if reader.complete and numbers:
            assert numbers[0] == 0
    if not restarted:
        assert reader.known[-1] == publisher.batches[-1]


def test_after_a_start_all_that_is_kept_is_asked_for() -> None:
    publisher, sequence, reader = Publisher(keeps=3), Sequence(replays=True), Reader()
    for _ in range(5):
        publisher.publish()
    sequence.live(*publisher.publish())
    answer(sequence, publisher)
    reader.read(sequence)
    assert reader.known == [b"0:3", b"0:4", b"0:5"]
    assert not reader.complete


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("room", [2, 3, 50])
def test_an_answer_that_is_cut_short_is_asked_for_on(room: int, ends: bool) -> None:
    """As vLLM's is, of more than 1,000 batches; nothing says so."""
    publisher, sequence, reader = Publisher(99, room, ends), Sequence(replays=True), Reader()
    for _ in range(20):
        publisher.publish()
    answer(sequence, publisher)
    reader.read(sequence)
    assert reader.known == publisher.batches
    assert reader.complete
    assert sequence.counts == {"replayed": 20}


def test_a_gap_is_filled() -> None:
    publisher, sequence, reader = Publisher(keeps=9), Sequence(replays=True), Reader()
    answer(sequence, publisher)
    sequence.live(*publisher.publish())
    publisher.publish()
    publisher.publish()
    sequence.live(*publisher.publish())
    assert sequence.ask == 0
    sequence.live(*publisher.publish())
    answer(sequence, publisher)
    reader.read(sequence)
    assert reader.known == [b"0:%d" % i for i in range(5)]
    assert reader.complete
    assert sequence.counts == {"gap": 1, "replayed": 3 + 1}


def test_a_gap_that_cannot_be_filled_voids_what_was_known() -> None:
    for replays in (True, False):
        publisher, sequence, reader = Publisher(keeps=2), Sequence(replays=replays), Reader()
        answer(sequence, publisher)
        sequence.live(*publisher.publish())
        for _ in range(5):
            publisher.publish()
        sequence.live(*publisher.publish())
        answer(sequence, publisher)
        reader.read(sequence)
        assert reader.known == [b"0:5", b"0:6"][0 if replays else 1 :]
        assert not reader.complete
        assert sequence.counts["lost"] == 1


def test_a_restart_is_seen_though_its_numbers_go_on() -> None:
    """The new publisher has got further than the old one before anything of it is received."""
    publisher, sequence, reader = Publisher(keeps=99), Sequence(replays=True), Reader()
    answer(sequence, publisher)
    for _ in range(3):
        sequence.live(*publisher.publish())
    publisher.restart()
    for _ in range(5):
        publisher.publish()
    sequence.live(*publisher.publish())
    answer(sequence, publisher)
    reader.read(sequence)
    assert reader.known == [b"1:%d" % i for i in range(6)]
    assert reader.complete


def test_a_restart_is_seen_at_the_first_batch() -> None:
    for replays in (True, False):
        publisher, sequence, reader = Publisher(keeps=99), Sequence(replays=replays), Reader()
        answer(sequence, publisher)
        for _ in range(3):
            sequence.live(*publisher.publish())
        publisher.restart()
        sequence.live(*publisher.publish())
        reader.read(sequence)
        assert (reader.known, reader.complete) == ([b"1:0"], True)
        assert sequence.counts == {"restart": 1}


def test_a_replay_without_what_was_missed_is_not_asked_for_again_and_again() -> None:
    publisher, sequence, reader = Publisher(keeps=99), Sequence(replays=True), Reader()
    answer(sequence, publisher)
    sequence.live(*publisher.publish())
    publisher.publish()
    sequence.live(*publisher.publish())
    for _ in range(3):
        sequence.replayed(0, b"0:0")
        sequence.replay_ended()
    assert sequence.ask is None
    reader.read(sequence)
    assert (reader.known, reader.complete) == ([b"0:2"], False)


def test_a_check_brings_what_nobody_heard() -> None:
    publisher, sequence, reader = Publisher(keeps=99), Sequence(replays=True), Reader()
    answer(sequence, publisher)
    for _ in range(3):
        publisher.publish()
    for _ in range(2):
        sequence.check()
        answer(sequence, publisher)
        reader.read(sequence)
        assert reader.known == [b"0:0", b"0:1", b"0:2"]
        assert reader.complete


def test_a_check_tells_of_a_restart() -> None:
    publisher, sequence, reader = Publisher(keeps=99), Sequence(replays=True), Reader()
    answer(sequence, publisher)
    sequence.live(*publisher.publish())
    publisher.restart()
    publisher.publish()
    sequence.check()
    answer(sequence, publisher)
    reader.read(sequence)
    assert (reader.known, reader.complete) == ([b"1:0"], True)


def test_where_nothing_can_be_replayed_a_check_asks_nothing() -> None:
    sequence = Sequence(replays=False)
    sequence.live(0, b"0:0")
    sequence.check()
    assert sequence.ask is None


def test_told_of_a_restart_it_begins_anew() -> None:
    publisher, sequence, reader = Publisher(keeps=99), Sequence(replays=True), Reader()
    answer(sequence, publisher)
    sequence.live(*publisher.publish())
    publisher.restart()
    publisher.publish()
    sequence.restarted()
    sequence.live(*publisher.publish())
    answer(sequence, publisher)
    reader.read(sequence)
    assert reader.known == [b"1:0", b"1:1"]
    assert reader.complete


def test_without_an_answer_it_goes_on_with_what_comes() -> None:
    sequence, reader = Sequence(replays=True), Reader()
    sequence.live(7, b"0:7")
    sequence.live(8, b"0:8")
    sequence.replay_failed()
    reader.read(sequence)
    assert reader.known == [b"0:7", b"0:8"]
    assert not reader.complete
    assert sequence.ask is None
