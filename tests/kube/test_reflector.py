"""A local copy of objects: how it follows them, what it tells, what an API server in trouble does to it."""

from __future__ import annotations

import logging

import pytest

from tandem.kube.reflector import FIRST_PAUSE, LONGEST_PAUSE, WATCH_PAUSE

from .fakes import AWAY, OPEN, TOO_OLD, bookmark, following, listing, pod


async def test_objects_are_listed_once_and_then_followed_as_they_change() -> None:
    async with following() as f:
        assert not f.reflector.synced.is_set()
        await f.api.answers(listing(10, pod("a", 3), pod("b", 7)))
        assert f.reflector.synced.is_set()
        assert f.tells() == ["new a@3", "new b@7"]
        await f.api.answers(
            OPEN, ("ADDED", pod("c", 11)), ("MODIFIED", pod("a", 12)), ("DELETED", pod("b", 13))
        )
        assert f.tells() == ["new c@11", "a@3 → a@12", "gone b@13"]
        assert set(f.reflector) == {("ns", "a"), ("ns", "c")}
        assert f.reflector["ns", "a"] == pod("a", 12)
        assert f.api.asked == ["list", "watch 10"]


async def test_a_watch_that_ends_goes_on_where_it_ended_without_another_list() -> None:
    async with following() as f:
        await f.api.answers(listing(10, pod("a", 3)), OPEN, ("MODIFIED", pod("a", 11)), None)
        await f.api.answers(OPEN, bookmark(40), None)
        await f.api.answers(OPEN, ("DELETED", pod("a", 41)))
        assert f.api.asked == ["list", "watch 10", "watch 11", "watch 40"]
        assert f.tells() == ["new a@3", "a@3 → a@11", "gone a@41"]


async def test_a_watch_that_ends_at_once_is_opened_once_a_second_at_most() -> None:
    async with following() as f:
        await f.api.answers(listing(10), *[OPEN, None] * 5, OPEN)
        assert f.time.slept == [WATCH_PAUSE] * 5


@pytest.mark.parametrize("gone", [[TOO_OLD], [OPEN, TOO_OLD]], ids=["refused", "ended"])
async def test_after_a_version_that_is_gone_only_what_differs_is_told(gone: list[object]) -> None:
    async with following() as f:
        await f.api.answers(listing(10, pod("stays", 1), pod("changes", 2), pod("goes", 3)))
        f.tells()
        await f.api.answers(*gone)  # type: ignore[arg-type]
        assert len(f.reflector) == 3, "nothing is forgotten meanwhile"
        assert f.reflector.trouble is None, "this happens to every watch"
        await f.api.answers(listing(90, pod("comes", 80), pod("stays", 1), pod("changes", 70)), OPEN)
        assert f.tells() == ["gone goes@3", "new comes@80", "changes@2 → changes@70"]
        assert f.api.asked == ["list", "watch 10", "list", "watch 90"]


async def test_what_an_event_repeats_is_not_told_again() -> None:
    async with following() as f:
        await f.api.answers(listing(10, pod("a", 3)), OPEN, ("ADDED", pod("a", 3)), ("DELETED", pod("b", 4)))
        assert f.tells() == ["new a@3"]


async def test_who_manages_which_field_is_not_kept() -> None:
    async with following() as f:
        listed, watched = pod("a", 3), pod("b", 11)
        for found in (listed, watched):
            found["metadata"]["managedFields"] = [{"manager": "kubelet"}]
        await f.api.answers(listing(10, listed), OPEN, ("ADDED", watched))
        assert dict(f.reflector) == {("ns", "a"): pod("a", 3), ("ns", "b"): pod("b", 11)}


@pytest.mark.parametrize("by", ["watch", "list"])
async def test_another_object_of_the_same_name_is_told_as_one_gone_and_one_new(by: str) -> None:
    again = pod("a", 20, uid="another")
    async with following() as f:
        await f.api.answers(listing(10, pod("a", 3)), OPEN)
        if by == "watch":
            await f.api.answers(("MODIFIED", again))
        else:
            await f.api.answers(TOO_OLD, listing(30, again))
        assert f.tells() == ["new a@3", "gone a@3", "new a@20"]
        assert f.reflector["ns", "a"] == again


async def test_an_api_server_that_is_away_is_asked_ever_more_rarely_and_nothing_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with following() as f:
        await f.api.answers(listing(10, pod("a", 3)), OPEN, bookmark(15))
        await f.api.answers(*[AWAY] * 12)
        assert f.reflector.trouble == "connection refused"
        assert f.api.asked == ["list", "watch 10", *["watch 15"] * 12]
        for number, pause in enumerate(f.time.slept):
            longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2**number)
            assert longest / 2 <= pause <= longest
        assert max(f.time.slept) >= LONGEST_PAUSE / 2
        assert set(f.reflector) == {("ns", "a")}
        assert f.reflector.age == pytest.approx(sum(f.time.slept))
        await f.api.answers(OPEN)
        assert f.reflector.trouble is None
        assert f.reflector.age == 0, "what the server has taken it has heard"
        await f.api.answers(AWAY)
        assert f.time.slept[-1] <= FIRST_PAUSE, "the first pause again"
    assert [m for m in caplog.messages if "pods" in m] == [
        "watch of pods: connection refused; what is known of them stays",
        "watch of pods: works again",
        "watch of pods: connection refused; what is known of them stays",
    ]


async def test_the_longest_pause_can_be_shorter() -> None:
    async with following(longest_pause=2.0) as f:
        await f.api.answers(*[AWAY] * 8, listing(1))
        assert f.api.asked == [*["list"] * 9, "watch 1"]
        assert 1.0 <= max(f.time.slept) <= 2.0


async def test_age_is_the_time_since_the_server_was_heard() -> None:
    async with following() as f:
        assert f.reflector.age == float("inf")
        await f.api.answers(listing(10, pod("a", 3)))
        for event in (OPEN, bookmark(11), ("MODIFIED", pod("a", 12)), ("DELETED", pod("a", 13))):
            f.time.now += 50
            assert f.reflector.age == 50
            await f.api.answers(event)
            assert f.reflector.age == 0


async def test_a_kind_that_is_no_more_is_cleared_as_if_all_had_been_deleted() -> None:
    async with following() as f:
        await f.api.answers(listing(10, pod("a", 3), pod("b", 4)), OPEN)
        f.tells()
        f.reflector.clear()
        assert f.tells() == ["gone a@3", "gone b@4"]
        assert not f.reflector
        assert not f.reflector.synced.is_set()
