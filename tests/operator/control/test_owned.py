"""Objects are made as they are desired, mended when edited, and left alone otherwise."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tandem.kube import ApiError, Key, KubeError, Object, Resource
from tandem.kube import resources as kinds
from tandem.operator.control.desired import UID_ANNOTATION
from tandem.operator.control.owned import SHOWN_SECONDS, Owned, Refused
from tandem.operator.names import START_ANNOTATION

from ..fake_api import FakeApi

OURS = {"owner": "x"}
KEY = ("team-a", "config")


def config(**data: str) -> Object:
    annotations = {UID_ANNOTATION: "uid-of-the-endpoint"}
    metadata: Object = {"name": KEY[1], "namespace": KEY[0], "labels": OURS, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class World:
    """A cluster, and the copy of it that watches keep, which may lag behind."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.seen: dict[Resource, dict[Key, Object]] = defaultdict(dict)
        self.now = 0.0
        self.owned = Owned(self.api, self.seen, lambda: self.now)

    def look(self) -> None:
        before = self.seen[kinds.CONFIG_MAP]
        self.seen[kinds.CONFIG_MAP] = self.api.seen(kinds.CONFIG_MAP)
        for key in before.keys() - self.seen[kinds.CONFIG_MAP].keys():
            self.owned.gone(kinds.CONFIG_MAP, key)

    def restart(self) -> None:
        self.owned = Owned(self.api, self.seen, lambda: self.now)

    async def make(self, **data: str) -> bool:
        return await self.owned.make(config(**data), OURS)

    @property
    def live(self) -> Any:
        return self.api.objects[kinds.CONFIG_MAP, KEY]["data"]


async def test_it_is_made_once() -> None:
    world = World()
    assert await world.make(a="1")
    assert not await world.make(a="1"), "the watch does not show it yet"
    world.look()
    assert not await world.make(a="1")
    assert world.live == {"a": "1"}


async def test_it_is_made_otherwise_when_that_is_desired() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    assert await world.make(a="2")
    assert not await world.make(a="2"), "the watch still shows the old one"
    world.look()
    assert not await world.make(a="2")
    assert world.live == {"a": "2"}


async def test_an_edit_is_mended() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    world.api.edit(kinds.CONFIG_MAP, KEY, data={"a": "edited"})
    world.look()
    assert await world.make(a="1")
    assert world.live == {"a": "1"}
    world.look()
    assert not await world.make(a="1")


async def test_an_edit_back_to_what_it_was_before_our_change_is_mended_too() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    await world.make(a="2")
    world.look()
    world.api.edit(kinds.CONFIG_MAP, KEY, data={"a": "1"})
    world.look()
    assert await world.make(a="2")
    assert world.live == {"a": "2"}


async def test_what_is_deleted_is_made_again() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    await world.api.delete(kinds.CONFIG_MAP, KEY[1], KEY[0])
    world.look()
    assert await world.make(a="1")
    assert world.live == {"a": "1"}


async def test_what_the_watch_never_shows_is_made_again_after_a_while() -> None:
    world = World()
    await world.make(a="1")
    world.now = SHOWN_SECONDS + 1
    assert await world.make(a="1")


async def test_status_is_no_edit() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    world.api.edit(kinds.CONFIG_MAP, KEY, status={"ready": 1})
    world.look()
    assert not await world.make(a="1")


async def test_a_new_operator_sends_nothing_where_all_is_as_it_should_be() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    world.restart()
    world.api.calls.clear()
    assert not await world.make(a="1")
    assert world.api.calls == []


@pytest.mark.parametrize("edited", [{"a": "edited"}, {}, {"a": "1", "b": "more"}])
async def test_a_new_operator_mends_what_was_edited_while_none_ran(edited: dict[str, str]) -> None:
    world = World()
    await world.make(a="1")
    world.api.edit(kinds.CONFIG_MAP, KEY, data=edited)
    world.look()
    world.restart()
    assert await world.make(a="1") == (edited.get("a") != "1"), "what others have added may stay"
    assert world.live["a"] == "1"


async def test_a_new_operator_takes_away_what_its_predecessor_wanted() -> None:
    """Nothing of what is desired is missing then: only the digest tells."""
    world = World()
    await world.make(a="1", b="2")
    world.look()
    world.restart()
    assert await world.make(a="1")
    assert world.live == {"a": "1"}


async def test_anothers_object_is_not_taken() -> None:
    world = World()
    theirs = config(a="theirs")
    theirs["metadata"] |= {"labels": {"owner": "someone"}, "annotations": {UID_ANNOTATION: "another"}}
    await world.api.create(theirs, kinds.CONFIG_MAP, manager="them")
    with pytest.raises(Refused, match="another owner"):
        await world.make(a="1")
    assert world.live == {"a": "theirs"}
    world.look()
    with pytest.raises(Refused, match="another owner"):
        await world.make(a="1")


@pytest.mark.parametrize("labels", [{}, {"owner": "y"}])
@pytest.mark.parametrize("shown", [True, False], ids=["watched", "out of sight"])
async def test_an_object_without_our_labels_is_known_by_its_endpoint(
    labels: dict[str, str], shown: bool
) -> None:
    world = World()
    await world.make(a="1")
    metadata = world.api.objects[kinds.CONFIG_MAP, KEY]["metadata"]
    world.api.edit(kinds.CONFIG_MAP, KEY, metadata=metadata | {"labels": labels})
    world.look()
    if not shown:
        del world.seen[kinds.CONFIG_MAP][KEY]
        world.owned.gone(kinds.CONFIG_MAP, KEY)
    assert await world.make(a="1")
    assert world.api.objects[kinds.CONFIG_MAP, KEY]["metadata"]["labels"] == OURS


async def test_what_cannot_be_changed_is_made_anew_where_no_pod_ends_by_it() -> None:
    world = World()
    await world.make(a="1")
    world.look()
    uid = world.api.objects[kinds.CONFIG_MAP, KEY]["metadata"]["uid"]
    world.api.unchangeable = "data: Forbidden: field is immutable when `immutable` is set"
    assert await world.make(a="2")
    assert world.live == {"a": "2"}
    assert world.api.objects[kinds.CONFIG_MAP, KEY]["metadata"]["uid"] != uid
    world.look()
    assert not await world.make(a="2")


async def test_a_deployment_that_cannot_be_changed_is_left_and_what_to_do_is_told() -> None:
    world = World()
    deployment = config() | {"apiVersion": "apps/v1", "kind": "Deployment", "data": {}}
    await world.owned.make(deployment, OURS)
    world.api.unchangeable = "spec.selector: field is immutable"
    with pytest.raises(Refused, match="field is immutable; delete it, and it is made anew"):
        await world.owned.make(deployment | {"data": {"a": "2"}}, OURS)
    assert world.api.seen(kinds.DEPLOYMENT)


PLACE = ("team-a", "workers")


def scaled(start: int | None, *, pods: int | None = None, image: str = "a") -> Object:
    """A Deployment with `start` pods and an autoscaler, or with `pods` and none."""
    told = {UID_ANNOTATION: "uid-of-the-endpoint"}
    told |= {START_ANNOTATION: str(start)} if start is not None else {}
    metadata: Object = {"name": PLACE[1], "namespace": PLACE[0], "labels": OURS, "annotations": told}
    spec: Object = {"image": image} | ({"replicas": pods} if pods is not None else {})
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


class Workers(World):
    """A Deployment in a cluster with KEDA, or without."""

    def __init__(self, *, keda: bool) -> None:
        super().__init__()
        self.owned = Owned(self.api, self.seen, scales=lambda: keda)

    async def wants(self, desired: Object) -> bool:
        made = await self.owned.make(desired, OURS)
        self.seen[kinds.DEPLOYMENT] = self.api.seen(kinds.DEPLOYMENT)
        return made

    def scale(self, pods: int, *, shown: bool = True) -> None:
        """As an autoscaler does it; the watch may not show it yet."""
        spec = self.api.objects[kinds.DEPLOYMENT, PLACE]["spec"]
        self.api.edit(kinds.DEPLOYMENT, PLACE, spec=spec | {"replicas": pods})
        if shown:
            self.seen[kinds.DEPLOYMENT] = self.api.seen(kinds.DEPLOYMENT)

    @property
    def spec(self) -> Object:
        found: Object = self.api.objects[kinds.DEPLOYMENT, PLACE]["spec"]
        return found


@pytest.mark.parametrize("keda", [True, False])
async def test_an_autoscaled_deployment_starts_with_as_many_pods_as_it_says(keda: bool) -> None:
    workers = Workers(keda=keda)
    assert await workers.wants(scaled(3))
    assert workers.spec["replicas"] == 3
    assert not await workers.wants(scaled(3))


@pytest.mark.parametrize("shown", [True, False], ids=["seen", "not seen yet"])
async def test_what_an_autoscaler_has_scaled_stays_whatever_changes(shown: bool) -> None:
    workers = Workers(keda=True)
    await workers.wants(scaled(3))
    workers.scale(8)
    assert not await workers.wants(scaled(3)), "that is no edit"
    workers.scale(9, shown=shown)
    assert await workers.wants(scaled(2, image="b"))
    assert workers.spec == {"image": "b", "replicas": 9}


async def test_without_an_autoscaler_the_resources_number_is_followed_and_else_the_pods_stay() -> None:
    workers = Workers(keda=False)
    await workers.wants(scaled(3))
    await workers.wants(scaled(5))
    assert workers.spec["replicas"] == 5
    workers.scale(8)  # by KEDA, which is being replaced, or by hand
    assert await workers.wants(scaled(5, image="b"))
    assert workers.spec == {"image": "b", "replicas": 8}


@pytest.mark.parametrize("keda", [True, False])
async def test_an_autoscaler_that_comes_later_takes_no_pod_away(keda: bool) -> None:
    workers = Workers(keda=keda)
    await workers.wants(scaled(None, pods=4))
    await workers.wants(scaled(4))
    assert workers.spec["replicas"] == 4
    workers.scale(6)
    await workers.wants(scaled(None, pods=4))
    assert workers.spec["replicas"] == 4, "the number is the resource's again"


async def test_a_deployment_that_changes_all_the_time_is_left_for_the_next_pass() -> None:
    workers = Workers(keda=True)
    await workers.wants(scaled(3))

    async def overtaken(*_: object, **__: object) -> Object:
        raise ApiError(409, "Conflict", "the object has been modified")

    workers.api.apply = overtaken  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="modified"):
        await workers.wants(scaled(3, image="b"))


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_what_can_never_be_applied_is_refused(status: int) -> None:
    world = World()
    await world.make(a="1")
    world.look()
    world.api.refusal = ApiError(status, "Invalid", "spec is wrong")
    with pytest.raises(Refused, match="ConfigMap config: spec is wrong"):
        await world.make(a="2")


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_what_may_go_well_later_is_tried_again(status: int) -> None:
    world = World()
    await world.make(a="1")
    world.look()
    world.api.refusal = ApiError(status, "", "later")
    with pytest.raises(KubeError):
        await world.make(a="2")
    world.api.refusal = None
    assert await world.make(a="2")


async def test_only_the_object_that_was_seen_is_deleted() -> None:
    world = World()
    await world.make(a="1")
    old = world.api.objects[kinds.CONFIG_MAP, KEY]
    await world.api.delete(kinds.CONFIG_MAP, KEY[1], KEY[0])
    await world.api.create(config(a="new"), kinds.CONFIG_MAP, manager="x")
    await world.owned.remove(old)
    assert world.live == {"a": "new"}


async def test_what_is_being_deleted_is_not_deleted_again() -> None:
    world = World()
    await world.make(a="1")
    found = world.api.objects[kinds.CONFIG_MAP, KEY]
    leaving = {**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-11-30T00:00:00Z"}}
    world.api.calls.clear()
    await world.owned.remove(leaving)
    assert world.api.calls == []
