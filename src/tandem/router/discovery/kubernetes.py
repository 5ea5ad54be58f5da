"""Engines that are pods of a namespace of Kubernetes: those that labels select, while they are ready.

A pod that ends is told to routers when its end is decided, before its containers hear of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from ipaddress import ip_address

import msgspec

from tandem.config import engine_labels, engine_url
from tandem.kube import Key, NoCluster, Object, Reflector, connect, key_of
from tandem.kube.reflector import Source as Api
from tandem.kube.resources import POD
from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.engine_list import ENGINES_LIMIT, Subscriptions
from tandem.router.engines import EngineRole
from tandem.router.few import few
from tandem.router.trouble import Trouble

ROLE_LABEL = "inference.sagemaker.aws.amazon.com/dpd-role"
"""Of pods: prefill or decode. Those without it serve whole requests."""
LABELS = {
    "kv-layout": "tandem.dev/kv-layout",
    "revision": "pod-template-hash",
    "zone": "topology.kubernetes.io/zone",
}
"""Labels of an engine, and which labels of its pod they are."""

_RETRY = 5.0  # seconds until a cluster's configuration is looked for again
_LONGEST_PAUSE = 5.0  # seconds between attempts: after an outage all routers should soon be ready again
_SHOWN = 3  # pods with mistakes told at once; the others are counted


class _Metadata(msgspec.Struct):
    uid: str
    labels: dict[str, str] | None = None
    created: str | None = msgspec.field(name="creationTimestamp", default=None)
    leaving: str | None = msgspec.field(name="deletionTimestamp", default=None)


class _Spec(msgspec.Struct):
    node: str | None = msgspec.field(name="nodeName", default=None)


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    address: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[_Condition] | None = None

    @property
    def ready(self) -> bool:
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions or ())


class _Pod(msgspec.Struct):
    """What is read of a pod."""

    metadata: _Metadata
    spec: _Spec | None = None
    status: _Status | None = None


class KubernetesDiscovery(Discovery):
    """Follows pods by a list and a watch. An API server that cannot be reached changes nothing but what is
    said of it: the pods last known stay engines."""

    def __init__(
        self,
        namespace: str,
        port: int,
        selector: str,
        *,
        subscriptions: Subscriptions = lambda host: None,
        stale_after: float = 120.0,
        connect: Callable[[], AbstractAsyncContextManager[Api]] = connect,
        limit: int = ENGINES_LIMIT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`port`: where each pod serves. `selector`: of labels, as the API server takes it. `subscriptions`
        tells where the engine at an address publishes its KV events. `stale_after`: see `missing`. `connect`
        raises NoCluster where it finds none, and is tried again."""
        self._namespace = namespace
        self._port = port
        self._selector = selector
        self._subscriptions = subscriptions
        self._stale_after = stale_after
        self._connect = connect
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._reflector: Reflector | None = None
        self._changed = asyncio.Event()
        self._found: dict[Key, tuple[str, Member]] = {}
        """Pods that are engines, each with the time of its creation."""
        self._mistakes: dict[Key, str] = {}
        self._members: frozenset[Member] = frozenset()
        self._known = False
        self._trouble = Trouble(f"engines that are pods of {namespace} with {selector}")

    @property
    def trouble(self) -> str | None:
        """What is wrong with the API server, or with the pods, now, and what comes of it."""
        if self._reflector is not None and self._reflector.trouble is not None:
            return f"the API server: {self._reflector.trouble}; {self._then}"
        return self._trouble.text

    @property
    def age(self) -> float:
        """Seconds since the API server was last heard; infinite before the first time."""
        return float("inf") if self._reflector is None else self._reflector.age

    @property
    def missing(self) -> str | None:
        """Why too little is known of the engines for a router to be ready: the pods were not listed yet, or
        nothing was heard of them for longer than `stale_after`."""
        if not self._known:
            why = self.trouble or "the API server has not listed their pods"
            return f"the engines are not known yet: {why}"
        if self.age > self._stale_after:
            why = self.trouble or "the API server is silent"
            return f"what is known of the engines is more than {self._stale_after:g} s old: {why}"
        return None

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """See `Discovery.watch`. Begins when the pods have been listed."""
        told: frozenset[Member] | None = None
        async with self._following() as following:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if following.done():
                    following.result()  # raises: it ends by nothing but a mistake of ours
                self._take()
                if self._members != told:
                    told = self._members
                    yield told

    @asynccontextmanager
    async def _following(self) -> AsyncIterator[asyncio.Task[None]]:
        """A reflector of the pods at work, once it has listed them."""
        async with AsyncExitStack() as stack:
            api = await self._connected(stack)
            self._found.clear()
            self._mistakes.clear()
            reflector = self._reflector = Reflector(
                api,
                POD,
                self._note,
                namespace=self._namespace,
                labels=self._selector,
                longest_pause=_LONGEST_PAUSE,
                clock=self._clock,
                sleep=self._sleep,
            )
            following = asyncio.create_task(reflector.run())
            listed = asyncio.create_task(reflector.synced.wait())
            try:
                await asyncio.wait((following, listed), return_when=asyncio.FIRST_COMPLETED)
                self._known = self._known or listed.done()
                following.add_done_callback(lambda _: self._changed.set())
                self._changed.set()  # there may be no pods
                yield following
            finally:
                following.cancel()
                listed.cancel()
                await asyncio.gather(following, listed, return_exceptions=True)

    async def _connected(self, stack: AsyncExitStack) -> Api:
        while True:
            try:
                return await stack.enter_async_context(self._connect())
            except NoCluster as error:
                self._trouble.tell(f"no cluster: {error}; {self._then}")
                await self._sleep(_RETRY)

    def _note(self, before: Object | None, after: Object | None) -> None:
        """A pod has come, changed or gone."""
        pod = after or before
        assert pod is not None
        key = key_of(pod)
        self._found.pop(key, None)
        self._mistakes.pop(key, None)
        self._changed.set()
        if after is None:
            return
        try:
            found = self._engine(msgspec.convert(after, _Pod))
        except ValueError as error:  # msgspec's own are such, too
            self._mistakes[key] = f"pod {key[1]}: {error}"
            return
        if found is not None:
            self._found[key] = found

    def _engine(self, pod: _Pod) -> tuple[str, Member] | None:
        """A pod as an engine, with the time of its creation; None while it is none. Raises ValueError."""
        metadata, status = pod.metadata, pod.status
        if metadata.leaving is not None or status is None or not status.ready or not status.address:
            return None
        labels = metadata.labels or {}
        role = labels.get(ROLE_LABEL, EngineRole.BOTH.value)
        try:
            its_role = EngineRole(role)
        except ValueError:
            raise ValueError(f"its label {ROLE_LABEL} is {role!r}, not prefill or decode") from None
        address = ip_address(status.address)
        host = f"[{address}]" if address.version == 6 else str(address)
        known = {name: labels[label] for name, label in LABELS.items() if label in labels}
        if pod.spec is not None and pod.spec.node:
            known["node"] = pod.spec.node
        member = Member(
            engine_url(f"http://{host}:{self._port}"),
            its_role,
            uid=metadata.uid,
            labels=engine_labels(known),
            kv_events=self._subscriptions(str(address)),
        )
        return metadata.created or "", member

    def _take(self) -> None:
        """Make members of what was found."""
        # Of pods that claim one address the newest has it.
        by_age = sorted(self._found.values(), key=lambda found: found[0])
        found = frozenset({member.url: member for _, member in by_age}.values())
        shown = few(sorted(self._mistakes.values()), _SHOWN)
        if len(found) > self._limit:
            shown.append(f"there are more than {self._limit:,} pods")
        else:
            self._members = found
        if not found and not shown:
            number = len(self._reflector or ())
            shown.append(f"none of the pods ({number:,}) is ready" if number else "there is no such pod")
        if shown:
            self._trouble.tell("; ".join([*shown, self._then]))
        else:
            self._trouble.over()

    @property
    def _then(self) -> str:
        return "those found stay in use" if self._members else "there are none"
