"""When an engine's KV events are believed, and when what was sent to it counts."""

from __future__ import annotations

import itertools
import logging

import pytest

from tandem.router.engines import Engine
from tandem.router.strategies import KvAware, KvIndex, KvPrefixes, Prompt, SentIndex
from tandem.router.strategies.kv_index import Rank
from tandem.router.strategies.kvaware import SILENT

from .helpers import fleet, prompt

SIZE = 4


class Box:
    """An engine that is followed from its start on, and another."""

    def __init__(self, ranks: int = 1) -> None:
        self.index = KvIndex()
        self.prefixes = KvPrefixes(self.index, SentIndex(SIZE, stride=1))
        self.strategy = KvAware(self.prefixes)
        self.engine, self.other = fleet(2)
        self.ranks = [self.index.follow(self.engine, number, complete=True) for number in range(ranks)]
        self.number = itertools.count()

    def new(self) -> Prompt:
        return prompt([next(self.number)] * 20)

    def tell(self, asked: Prompt, rank: Rank | None = None) -> None:
        """The event of a prompt that was computed."""
        ids = list(asked.ids or ())
        blocks = len(ids) // SIZE
        self.index.store(
            rank or self.ranks[0], [hash((*ids, i)) for i in range(blocks)], None, ids[: blocks * SIZE], SIZE
        )

    def hit(self, asked: Prompt, engine: Engine | None = None) -> int:
        engine = engine or self.engine
        return self.prefixes.match(asked, [engine]).hit(engine).tokens

    @property
    def doubt(self) -> str | None:
        return self.prefixes.doubt(self.engine)


def test_an_engine_that_serves_and_tells_nothing_is_believed_to_have_what_it_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its events go nowhere, or to a port that nobody listens at: nothing was ever heard."""
    box = Box()
    caplog.set_level(logging.WARNING)
    sent = [box.new() for _ in range(SILENT + 3)]
    for asked in sent:
        box.strategy.sent(asked, box.engine)
    assert box.doubt == "silent"
    assert box.hit(sent[0]) == 16
    assert box.strategy.fallbacks == {"silent": 4}
    assert caplog.text.count("silent") == 1
    box.tell(sent[-1])
    assert box.doubt is None, "it is heard again"
    assert box.hit(sent[0]) == 0
    assert box.hit(sent[-1]) == 16


def test_it_may_fall_silent_later() -> None:
    box = Box()
    for _ in range(50):
        asked = box.new()
        box.strategy.sent(asked, box.engine)
        box.tell(asked)
    assert box.doubt is None
    for _ in range(SILENT):
        box.strategy.sent(box.new(), box.engine)
    assert box.doubt == "silent"
    box.strategy.gone(box.engine)
    assert box.doubt is None, "it begins anew"


@pytest.mark.parametrize("how", ["in flight", "known", "without blocks", "keeps nothing", "another rank"])
def test_silence_is_no_sign_where_nothing_is_to_be_told(how: str) -> None:
    box = Box(ranks=2)
    repeated = box.new()
    for _ in range(3 * SILENT):
        match how:
            case "in flight":
                box.engine.in_flight += 1
                box.strategy.sent(box.new(), box.engine)
            case "known":
                box.strategy.sent(repeated, box.engine)
            case "without blocks":
                box.strategy.sent(prompt([next(box.number)] * (SIZE - 1)), box.engine)
            case "keeps nothing":
                box.engine.cache_tokens = 0
                box.strategy.sent(box.new(), box.engine)
            case "another rank":
                asked = box.new()
                box.strategy.sent(asked, box.engine)
                box.tell(asked, box.ranks[1])
    assert box.doubt is None


def test_an_engine_whose_events_cannot_be_read_is_not_believed_until_they_can() -> None:
    box = Box()
    for _ in range(300):
        box.ranks[0].note(unread=True)
    asked = box.new()
    box.strategy.sent(asked, box.engine)
    assert box.doubt == "unread"
    assert box.hit(asked) == 16
    assert box.strategy.fallbacks == {"unread": 1}
    readable = 0
    while box.doubt is not None:
        box.tell(box.new())
        readable += 1
    assert 100 < readable < 1000


def test_an_event_now_and_then_that_cannot_be_read_changes_nothing() -> None:
    box = Box()
    for number in range(1000):
        if number % 20 == 10:
            box.ranks[0].note(unread=True)
        box.tell(box.new())
        assert box.doubt is None or number < 20


def test_a_publisher_that_begins_anew_is_judged_anew() -> None:
    box = Box()
    for _ in range(50):
        box.ranks[0].note(unread=True)
    box.index.clear(box.ranks[0])
    assert box.doubt == "unread"
    box.index.follow(box.engine, complete=True)
    assert box.doubt is None


def test_nothing_is_kept_of_an_engine_that_has_left() -> None:
    box = Box()
    box.engine.left = True
    box.strategy.gone(box.engine)
    box.prefixes.sent(box.new(), box.engine)
    assert box.engine not in box.prefixes._awaited
