"""Which of several operators works: the one that holds the Lease."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from tandem.kube import ApiError, KubeError, Object, Reflector, Resource
from tandem.kube import resources as kinds
from tandem.kube.reflector import Source
from tandem.operator.control.owned import MANAGER

LEASE_SECONDS = 15
"""How long a lease holds without being renewed."""
RENEWED = 1 / 5
"""The part of that between two renewals."""
GIVEN_UP = 2 / 3
"""The part after which a holder that could not renew stops, before another may begin."""

log = logging.getLogger(__name__)


class Leases(Source, Protocol):
    async def get(self, resource: Resource, name: str, namespace: str | None = ...) -> Object | None: ...
    async def create(self, made: Object, resource: Resource, *, manager: str) -> Object: ...
    async def replace(self, made: Object, resource: Resource, *, manager: str) -> Object: ...


class LostLease(KubeError):
    """Another operator may hold the lease by now: this one must stop, and write nothing more."""


class Leader:
    """One candidate for a Lease (coordination.k8s.io), as client-go's leader election has it: whoever sees
    that the record has not changed for as long as it was said to hold, by the own clock, takes it over."""

    def __init__(
        self,
        client: Leases,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        lasts: int = LEASE_SECONDS,
    ) -> None:
        """`lasts`: seconds, see LEASE_SECONDS."""
        self._client = client
        self._lasts = lasts
        self._renew, self._give_up = lasts * RENEWED, lasts * GIVEN_UP
        self._namespace, self._name = namespace, name
        self._identity = identity
        self._clock = clock
        self._seen: tuple[object, float] = (None, 0.0)
        """The last record, and when it was first seen so."""
        self._renewed = -float("inf")
        self._free = asyncio.Event()
        """Set when the lease is seen to be nobody's."""
        self.leads = False

    async def acquire(self) -> None:
        """Returns once this candidate holds the lease."""
        if not await self._attempt():
            log.info("another operator holds the lease %s/%s: waiting", self._namespace, self._name)
            # It is told when the lease is given back, and so has it before a pod that has yet to start.
            watch = asyncio.create_task(self._lease().run())
            try:
                await self._pause()
                while not await self._attempt():
                    await self._pause()
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        self.leads = True
        log.info("holds the lease %s/%s as %s", self._namespace, self._name, self._identity)

    def _lease(self) -> Reflector:
        def changed(_: Object | None, after: Object | None) -> None:
            # One that someone deletes is not given back: its holder makes it anew.
            if after is not None and not after.get("spec", {}).get("holderIdentity"):
                self._free.set()

        fields = f"metadata.name={self._name}"
        return Reflector(self._client, kinds.LEASE, changed, namespace=self._namespace, fields=fields)

    async def _pause(self) -> None:
        """Until the next look at a lease that may have run out, or at once when it is free."""
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(asyncio.sleep(self._renew * random.uniform(0.8, 1.2))),
            asyncio.create_task(self._free.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._free.clear()

    async def hold(self) -> None:
        """Renews until it cannot. Raises LostLease."""
        try:
            while True:
                await asyncio.sleep(self._renew)
                if await self._attempt():
                    continue
                if self._taken or self._clock() - self._renewed > self._give_up:
                    raise LostLease(f"lease {self._namespace}/{self._name} is lost")
        finally:
            self.leads = False

    def check(self) -> None:
        """Raises LostLease where the lease may have run out: a process that was frozen and goes on does not
        know it before it has asked."""
        if not self.leads or self._clock() - self._renewed > self._give_up:
            raise LostLease(f"lease {self._namespace}/{self._name} may be another's: nothing is written")

    async def release(self) -> None:
        """So that another need not wait. Not being able to is no error."""
        try:
            lease = await self._client.get(kinds.LEASE, self._name, self._namespace)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                lease["spec"]["leaseDurationSeconds"] = 1
                await self._client.replace(lease, kinds.LEASE, manager=MANAGER)
        except KubeError as error:
            log.warning("the lease could not be given back: %s", error)

    @property
    def _taken(self) -> bool:
        record = self._seen[0]
        return isinstance(record, tuple) and record[0] not in ("", self._identity)

    async def _attempt(self) -> bool:
        """Take the lease, or renew it; False where another holds it or the API server does not answer."""
        try:
            async with asyncio.timeout(self._give_up / 2):
                return await self._take()
        except ApiError as error:
            if not error.conflict:
                log.warning("lease %s/%s: %s", self._namespace, self._name, error)
        except KubeError as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error)
        except TimeoutError:
            log.warning("lease %s/%s: no answer", self._namespace, self._name)
        return False

    async def _take(self) -> bool:
        asked = self._clock()
        lease = await self._client.get(kinds.LEASE, self._name, self._namespace)
        if lease is None:
            made = {
                "apiVersion": kinds.LEASE.api_version,
                "kind": kinds.LEASE.kind,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._record({}),
            }
            await self._client.create(made, kinds.LEASE, manager=MANAGER)
        else:
            spec = lease.get("spec") or {}
            record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseDurationSeconds"))
            if record != self._seen[0]:
                self._seen = record, asked
            holder = spec.get("holderIdentity")
            lasts = float(spec.get("leaseDurationSeconds") or self._lasts)
            if holder not in ("", None, self._identity) and asked - self._seen[1] < lasts:
                return False
            lease["spec"] = spec | self._record(spec)
            await self._client.replace(lease, kinds.LEASE, manager=MANAGER)
        self._renewed = asked
        return True

    def _record(self, before: Object) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        record: Object = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._lasts,
            "renewTime": now,
        }
        if before.get("holderIdentity") != self._identity:
            record["acquireTime"] = now
            record["leaseTransitions"] = before.get("leaseTransitions", 0) + (1 if before else 0)
        return record
