"""The decoder's score: each of its four parts decides where the others are equal."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tandem.router.engines import Engine
from tandem.router.strategies import DecoderLoad, DecoderScore, OutputEstimate, Prompt, SentIndex

from .helpers import fleet, prompt


@dataclass
class Loads:
    of: dict[Engine, DecoderLoad] = field(default_factory=dict)

    def __call__(self, engine: Engine) -> DecoderLoad:
        return self.of.get(engine, DecoderLoad())


@pytest.mark.parametrize(
    "busier", [DecoderLoad(tokens=100), DecoderLoad(kv_use=0.9), DecoderLoad(buffer_use=0.6)]
)
def test_the_less_busy_is_taken(busier: DecoderLoad) -> None:
    a, b = engines = fleet(2)
    for busy, free in ((a, b), (b, a)):
        strategy = DecoderScore(Loads({busy: busier}))
        assert all(strategy.choose(Prompt(10), engines).engine is free for _ in range(10))


def test_kv_use_and_buffer_do_not_matter_before_they_press() -> None:
    a, b = engines = fleet(2)
    loads = Loads({a: DecoderLoad(tokens=10), b: DecoderLoad(kv_use=0.8, buffer_use=0.4)})
    assert DecoderScore(loads).choose(Prompt(10), engines).engine is b


def test_a_cached_prefix_counts_in_full_only_where_it_saves_computing() -> None:
    a, b = engines = fleet(2)
    strategy = DecoderScore(Loads({a: DecoderLoad(tokens=500)}), SentIndex())
    strategy.sent(prompt(range(1000)), a)
    assert strategy.choose(prompt(range(1000)), engines).engine is b, "a prompt on its way is in no cache"
    strategy.computed(prompt(range(1000)), a)
    computed = strategy.choose(prompt(range(1000)), engines)
    assert (computed.engine, computed.hit_tokens) == (a, 960)
    assert strategy.choose(prompt(range(1000)), engines, computes=False).engine is b
    strategy.gone(a)
    assert strategy.choose(prompt(range(1000)), engines).engine is b


def test_equals_share() -> None:
    strategy = DecoderScore(Loads(), rng=random.Random(1))
    engines = fleet(3)
    taken = Counter(strategy.choose(Prompt(10), engines).engine.url for _ in range(300))
    assert min(taken.values()) > 60


def test_of_many_a_few_are_compared_and_the_load_stays_even() -> None:
    engines, loads = fleet(100), Loads()
    strategy = DecoderScore(loads, rng=random.Random(1))
    for _ in range(2000):
        choice = strategy.choose(Prompt(10), engines)
        assert len(choice.scores) <= 4
        loads.of[choice.engine] = DecoderLoad(loads(choice.engine).tokens + 10)
    assert max(load.tokens for load in loads.of.values()) <= 240  # the mean is 200


def test_expected_outputs_follow_what_was_seen() -> None:
    estimate = OutputEstimate(first=256)
    assert (estimate.expect(None), estimate.expect(16)) == (256, 16)
    for _ in range(500):
        estimate.seen(1000)
    assert estimate.expect(None) >= 990
    assert estimate.expect(64) == 64
