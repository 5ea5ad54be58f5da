"""Engines' logs, read for the transport that they tell: once for each start of an engine, and a few times
more where it tells none yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from tandem.kube import ApiError, Client, Key, KubeError, Object, key_of
from tandem.operator import names
from tandem.operator.control.status import Outcome
from tandem.operator.control.transport import MOVER, UNKNOWN, Moves, summary, transports
from tandem.operator.control.trouble import is_ready

AFTER_SECONDS = (0, 15, 60, 300, 1800)
"""When a log is read, counted from when the engine was first seen ready; never again once it has told. A
router sends KV across a pair before it uses it, so that an engine tells within seconds."""
MOST_BYTES = 1 << 20
"""Of a log, from its start: engines tell early."""
MOST_READ = 4
"""Logs that are read in one pass over an endpoint."""

log = logging.getLogger(__name__)


@dataclass
class _Engine:
    """One start of an engine."""

    since: datetime
    reads: int = 0
    told: tuple[str, ...] = ()
    problem: str = ""
    """Why its log could not be read."""

    @property
    def due(self) -> datetime | None:
        if self.told or self.reads == len(AFTER_SECONDS):
            return None
        return self.since + timedelta(seconds=AFTER_SECONDS[self.reads])


@dataclass
class EngineLogs:
    client: Client
    now: Callable[[], datetime]
    _engines: dict[Key, dict[str, _Engine]] = field(default_factory=dict)
    """By endpoint, and by the id of the engine's container."""

    def forget(self, key: Key) -> None:
        self._engines.pop(key, None)

    async def look(
        self, found: Object, outcome: Outcome, pods: Sequence[Object], before: Mapping[str, object]
    ) -> tuple[Outcome, float | None]:
        """The outcome with the transport that the endpoint's engines tell, and after how many seconds to look
        again; `before` is its status until now. No answer from the API server is no failure of the pass."""
        mover = MOVER.get((outcome.transfer or {}).get("connector", ""))
        if outcome.transfer is None or mover is None:
            return outcome, None
        component, moves = mover
        key = key_of(found)
        name = next((w.deployment[1] for w in outcome.wanted if w.component == component), "")
        ready = {uid: pod for pod in pods if (uid := _container_id(pod, component, name))}
        known = self._engines.get(key, {})
        engines = {uid: known.get(uid) or _Engine(self.now()) for uid in sorted(ready)}
        self._engines[key] = engines
        for uid in self._due(engines)[:MOST_READ]:
            await self._read(engines[uid], ready[uid], name, moves)
        text = summary(engine.told for engine in engines.values())
        text = text or _as_before(found, before) or f"{UNKNOWN}: {_why(component, engines)}"
        return replace(outcome, transfer={**outcome.transfer, "transport": text}), self._wait(engines)

    def _due(self, engines: Mapping[str, _Engine]) -> list[str]:
        now = self.now()
        return [uid for uid, engine in engines.items() if engine.due is not None and engine.due <= now]

    def _wait(self, engines: Mapping[str, _Engine]) -> float | None:
        due = [engine.due for engine in engines.values() if engine.due is not None]
        return max(1.0, (min(due) - self.now()).total_seconds()) if due else None

    async def _read(self, engine: _Engine, pod: Object, container: str, moves: Moves) -> None:
        namespace, name = key_of(pod)
        engine.reads += 1
        engine.problem = ""
        try:
            text = await self.client.log(name, namespace, container, most_bytes=MOST_BYTES)
        except ApiError as error:
            engine.problem = error.message
        except KubeError as error:
            engine.problem = str(error)
        else:
            engine.told = transports(text, moves)
        if engine.problem:
            log.warning("the log of pod %s/%s cannot be read: %s", namespace, name, engine.problem)


def _container_id(pod: Object, component: str, container: str) -> str | None:
    """Of the engine of a ready pod of a component; another one after each start."""
    labels = pod["metadata"].get("labels", {})
    if labels.get(names.COMPONENT_LABEL) != component or not is_ready(pod):
        return None
    statuses = pod["status"].get("containerStatuses") or ()
    return next((s.get("containerID") for s in statuses if s["name"] == container), None)


def _as_before(found: Object, before: Mapping[str, object]) -> str | None:
    """What was told of the endpoint as it is now: after the operator has started anew, the beginning of an
    engine's log may be gone."""
    transfer = before.get("transfer")
    told = transfer.get("transport") if isinstance(transfer, dict) else None
    same = before.get("observedGeneration") == found["metadata"].get("generation")
    return told if same and told and not told.startswith(UNKNOWN) else None


def _why(component: str, engines: Mapping[str, _Engine]) -> str:
    if not engines:
        return f"no {component} engine is ready"
    problem = next((engine.problem for engine in engines.values() if engine.problem), None)
    if problem:
        return f"the logs of {component} engines cannot be read: {problem}"
    if any(engine.due for engine in engines.values()):
        return f"no {component} engine has logged one yet"
    return (
        f"no {component} engine has logged one; UCX does with UCX_PROTO_INFO, libfabric with NIXL_LOG_LEVEL"
    )
