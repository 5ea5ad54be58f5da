"""A source of objects whose every answer a test gives, and a follower of a reflector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tandem.kube import ApiError, KubeError, Object, Reflector, Resource
from tandem.kube.client import Listing
from tandem.kube.resources import POD

Answer = Listing | tuple[str, Object] | Exception | None

OPEN: tuple[str, Object] = ("OPEN", {})
TOO_OLD = ApiError(410, "Expired", "too old resource version")
AWAY = KubeError("connection refused")


def pod(name: str, version: int, *, uid: str | None = None, **more: Any) -> Object:
    """`more`: fields beside the metadata, or `labels`."""
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version), "uid": uid or f"uid-{name}"}
    if "labels" in more:
        metadata["labels"] = more.pop("labels")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **more}


def bookmark(version: int) -> tuple[str, Object]:
    return "BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}


def listing(version: int, *items: Object) -> Listing:
    return Listing(list(items), str(version))


class Api:
    """Answers what it is given, in this order: to a list a Listing, to a watch events and None for its end;
    to both an error. Nothing is asked of it that a test has not foreseen."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._idle = asyncio.Event()

    def give(self, *answers: Answer) -> None:
        for answer in answers:
            self._answers.put_nowait(answer)

    async def answers(self, *answers: Answer) -> None:
        """Until whoever asks has taken them all, and waits for more."""
        self.give(*answers)
        await self._answers.join()
        await self._idle.wait()

    async def _next(self) -> Answer:
        self._idle.set()
        answer = await self._answers.get()
        self._idle.clear()
        return answer

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> Listing:
        self.asked.append("list")
        answer = await self._next()
        self._answers.task_done()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Listing), f"asked for a list, not for {answer}"
        return answer

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        version: str,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[tuple[str, Object]]:
        self.asked.append(f"watch {version}")
        while True:
            answer = await self._next()
            if isinstance(answer, tuple):
                yield answer
                self._answers.task_done()
                continue
            self._answers.task_done()
            if isinstance(answer, Exception):
                raise answer
            assert answer is None, f"asked for a watch, not for {answer}"
            return


class Time:
    """A clock that stands still but for sleeps, which last no time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Followed:
    """A reflector at work, and the changes that it told of."""

    def __init__(self, **options: Any) -> None:
        self.api = Api()
        self.time = Time()
        self.told: list[str] = []
        """As `new a@1`, `a@1 → a@2`, `gone a@2`."""
        self.reflector = Reflector(
            self.api, POD, self._changed, clock=self.time.clock, sleep=self.time.sleep, **options
        )

    def _changed(self, before: Object | None, after: Object | None) -> None:
        match before, after:
            case None, dict():
                self.told.append(f"new {_named(after)}")
            case dict(), None:
                self.told.append(f"gone {_named(before)}")
            case dict(), dict():
                self.told.append(f"{_named(before)} → {_named(after)}")

    def tells(self) -> list[str]:
        """What it told since the last time."""
        told, self.told = self.told, []
        return told


def _named(found: Object) -> str:
    metadata = found["metadata"]
    return f"{metadata['name']}@{metadata['resourceVersion']}"


@asynccontextmanager
async def following(**options: Any) -> AsyncIterator[Followed]:
    followed = Followed(**options)
    task = asyncio.create_task(followed.reflector.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
