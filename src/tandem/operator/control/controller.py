"""One pass over one endpoint: its objects made as they should be, and its status told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tandem.api.annotations import PREFIX, Extensions, parse_annotations
from tandem.kube import ApiError, Client, Key, Object, key_of, resource_of
from tandem.kube import resources as kinds
from tandem.operator import names
from tandem.operator.control import volumes
from tandem.operator.control.desired import UID_ANNOTATION, Desired, desired
from tandem.operator.control.engine_logs import EngineLogs
from tandem.operator.control.events import Recorder, transitions
from tandem.operator.control.owned import MANAGER, Owned, Refused
from tandem.operator.control.status import Outcome, change, deleting, new_status, pending
from tandem.operator.control.trouble import needs_warnings
from tandem.operator.control.watches import ENDPOINT, OWNED, Watches, labels_of
from tandem.operator.settings import Settings
from tandem.operator.texts import utc_now

FINALIZER = "tandem.dev/objects"
"""On an endpoint from before its first object is made until its last one is gone."""
QUIET_SECONDS = 10.0
"""A pod that has not started for so long is asked about: its Events tell why."""
LOOK_AGAIN_SECONDS = 15.0
MOST_ASKED = 4
"""Pods of one endpoint whose Events are read in one pass: pods of one kind have the same trouble."""
REFUSED_AGAIN_SECONDS = 30.0
"""After so long an object that was refused is offered again: a quota may have been raised."""
TOLD_FROM = 3
"""From so many passes in a row that fail the status tells why: one may be a moment's trouble."""
SLOW_SECONDS = 10.0
"""A pass that has lasted so long ends with its first failure: others wait for their turn."""

RENDERED_AT_ONCE = 2
"""Endpoints: the other threads, and their share of the interpreter, are for the webhooks."""


class Controller:
    """`reconcile` may be called at any time for any endpoint: it looks at what is there, not at what has
    happened. A pass over an endpoint that is as it should be sends nothing."""

    def __init__(
        self, client: Client, watches: Watches, settings: Settings, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._client = client
        self._watches = watches
        self._settings = settings
        self._now = now
        self._recorder = Recorder(client)
        self._logs = EngineLogs(client, now)
        self._owned = Owned(client, watches.owned, scales=lambda: watches.served(kinds.SCALED_OBJECT))
        self._desired: dict[Key, tuple[object, Desired]] = {}
        self._rendering = asyncio.Semaphore(RENDERED_AT_ONCE)
        self._told: dict[Key, tuple[list[str], Object]] = {}
        """The status last written, and the versions of the endpoint that it was not in yet; the last of them
        is the one with it."""
        self._failed: dict[Key, int] = {}
        """Passes in a row in which objects could not be made."""
        watches.gone.append(self._owned.gone)

    async def reconcile(self, key: Key) -> float | None:
        """Returns after how many seconds the endpoint should be looked at again without a change; None for
        never. Raises KubeError where the API server fails us: the pass is to be repeated."""
        found = self._watches.endpoints.get(key)
        if found is None:
            # Gone, with its finalizer taken off by force or while nobody looked.
            self._forget(key)
            await self._remove(self._made_for(key, None))
            return None
        metadata = found["metadata"]
        extensions = _for_the_operator(metadata.get("annotations") or {})
        if not extensions.managed:
            await self._let_go(found)
            return None
        if "deletionTimestamp" in metadata:
            await self._delete(found)
            return None
        if FINALIZER not in metadata.get("finalizers", ()):
            found = await self._finalizers(found, drop=False) or found
        made = await self._made(key, found)
        outcome, failure = self._lacking(made), None
        if made.objects and not extensions.paused:
            if "state" not in self._status(found):
                await self._tell(found, pending(found, self._now()))
            refused, failure = await self._make(key, found, made)
            outcome = replace(outcome, refused=refused)
        again = await self._report(found, outcome, paused=extensions.paused)
        if failure is not None:
            raise failure
        return again

    def _forget(self, key: Key) -> None:
        self._desired.pop(key, None)
        self._told.pop(key, None)
        self._logs.forget(key)
        self._failed.pop(key, None)

    def _made_for(self, key: Key, uid: str | None) -> list[Object]:
        """Objects that an operator made for the endpoint, or for an earlier one of its name; not those that
        someone has given the labels of this one, and that belong to another: its own pass mends them."""
        found = []
        for there in self._watches.owned_by(key):
            owner = (there["metadata"].get("annotations") or {}).get(UID_ANNOTATION)
            if owner is not None and (owner == uid or not self._watches.has_endpoint(owner)):
                found.append(there)
        return found

    def _status(self, found: Object) -> Object:
        """As last told, also where the watch does not show it yet."""
        versions, told = self._told.get(key_of(found), ([], {}))
        current: Object = found.get("status") or {}
        return told if found["metadata"]["resourceVersion"] in versions[:-1] else current

    async def _made(self, key: Key, found: Object) -> Desired:
        """Rendered again only where the endpoint has changed. In a thread: a long annotation takes seconds,
        and the loop has a lease to renew."""
        metadata = found["metadata"]
        of = metadata["uid"], metadata.get("generation"), metadata.get("annotations")
        kept = self._desired.get(key)
        if kept is None or kept[0] != of:
            async with self._rendering:
                kept = self._desired[key] = of, await asyncio.to_thread(desired, found, self._settings)
        return kept[1]

    def _lacking(self, made: Desired) -> Outcome:
        """With what the cluster lacks for it."""
        kinds_made = map(resource_of, made.objects)
        absent = {kind.definition for kind in kinds_made if not self._watches.served(kind)}
        no_driver = tuple(name for name in made.drivers if not self._watches.has_driver(name))
        return replace(made.outcome, absent=tuple(sorted(absent)), no_driver=no_driver)

    async def _make(self, key: Key, found: Object, made: Desired) -> tuple[tuple[str, ...], ApiError | None]:
        """Which objects are refused and why; and where one could not be made for now, why."""
        started = time.monotonic()
        refused: list[str] = []
        failure: ApiError | None = None
        ours = dict(zip((names.NAMESPACE_LABEL, names.ENDPOINT_LABEL), labels_of(key), strict=True))
        for thing in made.objects:
            if not self._watches.served(resource_of(thing)):
                continue
            try:
                await self._owned.make(thing, ours)
            except Refused as error:
                if error.terminating:
                    # All that is there goes, and each that goes brings the endpoint back here.
                    refused = [f"namespace {thing['metadata']['namespace']} is being deleted"]
                    break
                refused.append(str(error))
            except ApiError as error:
                if error.busy:
                    raise
                failure = failure or error
                if self._failed.get(key, 0) + 1 >= TOLD_FROM:
                    refused.append(f"{thing['kind']} {thing['metadata']['name']}: {error.message}")
                if time.monotonic() - started > SLOW_SECONDS:
                    break
        self._failed[key] = 0 if failure is None else self._failed.get(key, 0) + 1
        await self._remove(self._superfluous(key, found, made, whole=not refused and failure is None))
        return tuple(refused), failure

    def _superfluous(self, key: Key, found: Object, made: Desired, *, whole: bool) -> Iterator[Object]:
        """Volumes that can serve no more, and where all that is wanted is there (`whole`), what is not."""
        wanted = {(resource_of(thing), key_of(thing)) for thing in made.objects}
        pods = self._watches.pods_of(key)
        objects = self._made_for(key, found["metadata"]["uid"])
        for there in objects:
            if (resource_of(there), key_of(there)) in wanted:
                if volumes.worn_out(there):
                    yield there
            elif whole and not volumes.in_use(there, objects, pods):
                yield there

    async def _delete(self, found: Object) -> None:
        """What lies in the endpoint's namespace would go with it; what lies elsewhere would not. Each object
        that goes brings the endpoint back here. Last made goes first: load balancer and router before
        engines. A claim of weights and its volume go by themselves once the last pod has ended, which may
        take as long as its longest stream."""
        if FINALIZER not in found["metadata"].get("finalizers", ()):
            return
        made = self._made_for(key_of(found), found["metadata"]["uid"])
        left = sorted(made, key=_last_made, reverse=True)
        if not all(map(_goes_by_itself, left)):
            await self._remove(left)
            await self._tell(found, deleting(found, self._status(found), len(left), self._now()))
        else:
            await self._finalizers(found, drop=True)

    async def _let_go(self, found: Object) -> None:
        """An endpoint that is not for us: nothing of it is ours."""
        self._forget(key_of(found))
        if FINALIZER in found["metadata"].get("finalizers", ()):
            await self._finalizers(found, drop=True)

    async def _finalizers(self, found: Object, *, drop: bool) -> Object | None:
        """As it is then; None where it is gone."""
        metadata = found["metadata"]
        kept = [name for name in metadata.get("finalizers", ()) if name != FINALIZER]
        finalizers = kept if drop else [*kept, FINALIZER]
        # With the version, so that a finalizer that another adds meanwhile is not lost.
        patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": finalizers}}
        namespace, name = key_of(found)
        try:
            return await self._client.patch(ENDPOINT, name, namespace, patch, manager=MANAGER)
        except ApiError as error:
            if not error.missing:
                raise
            return None

    async def _remove(self, objects: Iterable[Object]) -> None:
        for there in list(objects):
            await self._owned.remove(there)

    async def _report(self, found: Object, outcome: Outcome, *, paused: bool) -> float | None:
        key = key_of(found)
        owned, pods = self._watches.owned_by(key), self._watches.pods_of(key)
        silent = sorted((pod for pod in pods if needs_warnings(pod)), key=lambda pod: key_of(pod))
        warnings = await self._warnings(silent)
        before = self._status(found)
        outcome, later = await self._logs.look(found, outcome, pods, before)
        deployments = [wanted.deployment for wanted in outcome.wanted]
        applied = {key: self._owned.generation(kinds.DEPLOYMENT, key) for key in deployments}
        status = new_status(
            found, before, outcome, owned, pods, warnings, applied=applied, paused=paused, now=self._now()
        )
        await self._tell(found, status)
        if silent:
            return LOOK_AGAIN_SECONDS
        return REFUSED_AGAIN_SECONDS if outcome.refused else later

    async def _warnings(self, silent: Sequence[Object]) -> dict[str, Sequence[Object]]:
        long_ago = self._now() - timedelta(seconds=QUIET_SECONDS)
        asked = [pod for pod in silent if _created(pod) < long_ago][:MOST_ASKED]
        found: dict[str, Sequence[Object]] = {}
        # One page: who may write Events of a pod may write any number.
        for pod in asked:
            uid = pod["metadata"]["uid"]
            listing = await self._client.list(
                kinds.EVENT,
                pod["metadata"]["namespace"],
                fields=f"involvedObject.uid={uid},type=Warning",
                whole=False,
            )
            found[uid] = listing.items
        return found

    async def _tell(self, found: Object, status: Object) -> None:
        before = self._status(found)
        patch = change(before, status)
        if not patch:
            return
        namespace, name = key_of(found)
        try:
            written = await self._client.patch(
                ENDPOINT, name, namespace, {"status": patch}, manager=MANAGER, subresource="status"
            )
        except ApiError as error:
            if error.missing:
                return
            raise
        version = found["metadata"]["resourceVersion"]
        versions, _ = self._told.get(key_of(found), ([], {}))
        # Those before it the watch has passed.
        known = versions[versions.index(version) :] if version in versions else [version]
        self._told[key_of(found)] = [*known, written["metadata"]["resourceVersion"]], status
        for event in transitions(before.get("conditions") or (), status["conditions"]):
            await self._recorder.tell(found, event, self._now())


def _for_the_operator(annotations: Mapping[str, str]) -> Extensions:
    """What is asked of the operator itself; a pass over an endpoint at rest reads no other annotation."""
    asked = (f"{PREFIX}managed", f"{PREFIX}paused")
    return parse_annotations({name: annotations[name] for name in asked if name in annotations})[0]


def _created(pod: Object) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"])


def _last_made(there: Object) -> tuple[int, bool]:
    of_router = there["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == "router"
    return OWNED.index(resource_of(there)), of_router


def _goes_by_itself(there: Object) -> bool:
    return "deletionTimestamp" in there["metadata"] and resource_of(there) in (kinds.CLAIM, kinds.VOLUME)
