"""Faults on demand: what breaks, where in an answer, for whom, how often.

Grammar, for the header `x-sim-fault`, the endpoint `/sim/faults` and `--fault`:

    faults := fault { ";" fault }
    fault  := KIND [ "=" VALUE ] [ "@" CHUNK ] { "," NAME "=" VALUE }

`@N`: after N chunks of a streamed answer; without it, before the first byte. Options: `times=N` the first N
requests only; `rate=P` each request with probability P (the same ones in every run); `leg=prefill` or
`leg=decode` only requests that hand KV over or take it, `leg=alone` only others.

    refuse           the engine does not listen (whole engine only)
    hang[@N]         accepts and says nothing more
    delay=S[@N]      waits S seconds
    reset[@N]        resets the connection
    crash[@N]        closes the connection in the middle; for the whole engine: the engine dies
    status=CODE      answers with this error instead of working
    head=CODE        sends the head of such an error and ends without its body
    error[@N]        an error event in a 200 stream, which then ends as if all were well
    truncate[@N]     the next chunk is cut in two and the connection closed
    badjson[@N]      what comes next is not JSON
    no-kv-params     the reply of a prefill has no kv_transfer_params
    lost-kv          the KV cannot be read, with LMCache not be written: the transfer fails
    stale-kv         the KV was overwritten: the transfer succeeds with another prompt's
    expired-lease    the lease is over at once: blocks may be reused before they are read
    full-buffer      no room for KV from another engine: such requests wait; with LMCache the prefiller stalls
    lost-notification      LMCache: the router is not told that the KV was written
    late-notification=S    LMCache: it is told S seconds late
    slow=FACTOR      every step takes this many times as long (whole engine only)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

Leg = Literal["prefill", "decode", "alone"]

# Kinds that take a number after "=", and whether they may stand "@" a chunk.
_VALUED = {"delay": True, "status": False, "head": False, "slow": False, "late-notification": False}
_PLACED = frozenset({"hang", "reset", "crash", "error", "truncate", "badjson", "delay"})
_BARE = frozenset(
    {"no-kv-params", "lost-kv", "stale-kv", "expired-lease", "full-buffer", "lost-notification", "refuse"}
)
_ENGINE_ONLY = frozenset({"refuse", "slow"})
KINDS = tuple(sorted({*_VALUED, *_PLACED, *_BARE}))

STREAM_KINDS = _PLACED | {"status", "head"}
"""Kinds that break an answer on its way; the others change what the engine does."""


class FaultError(ValueError):
    """What was asked for is not in the grammar."""


@dataclass(slots=True)
class Fault:
    kind: str
    value: float = 0.0
    chunk: int | None = None
    times: int | None = None
    rate: float = 1.0
    leg: Leg | None = None
    struck: set[str] = field(default_factory=set)
    """Requests that it applies to; it keeps applying to them."""

    def applies(self, request_id: str, leg: Leg) -> bool:
        """Whether it is this request's. Counts it once."""
        if request_id in self.struck:
            return True
        if self.leg is not None and self.leg != leg:
            return False
        if self.times is not None and len(self.struck) >= self.times:
            return False
        if self.rate < 1.0 and _chance(request_id) >= self.rate:
            return False
        if self.times is not None:
            self.struck.add(request_id)
        return True

    def __str__(self) -> str:
        value = f"={self.value:g}" if self.kind in _VALUED else ""
        place = "" if self.chunk is None else f"@{self.chunk}"
        options = [
            *([] if self.times is None else [f"times={self.times}"]),
            *([] if self.rate >= 1.0 else [f"rate={self.rate:g}"]),
            *([] if self.leg is None else [f"leg={self.leg}"]),
        ]
        return ",".join([f"{self.kind}{value}{place}", *options])


def parse(text: str, *, whole_engine: bool) -> list[Fault]:
    """Raises FaultError. `whole_engine`: it is not for one request."""
    faults = [_fault(part.strip()) for part in text.split(";") if part.strip()]
    for fault in faults:
        if fault.kind in _ENGINE_ONLY and not whole_engine:
            raise FaultError(f"{fault.kind}: is for a whole engine, not for one request")
    return faults


def _fault(text: str) -> Fault:
    what, *options = text.split(",")
    what, at, place = what.partition("@")
    kind, given, value = what.partition("=")
    if kind not in KINDS:
        raise FaultError(f"{kind!r}: is no kind of fault; there are {', '.join(KINDS)}")
    if bool(given) != (kind in _VALUED):
        raise FaultError(f"{text!r}: {kind} {'needs' if kind in _VALUED else 'takes no'} value after '='")
    if at and kind not in _PLACED:
        raise FaultError(f"{text!r}: {kind} cannot stand at a chunk")
    fault = Fault(kind)
    try:
        fault.value = float(value) if given else 0.0
        fault.chunk = int(place) if at else None
        for option in options:
            name, _, setting = option.partition("=")
            match name.strip():
                case "times":
                    fault.times = int(setting)
                case "rate":
                    fault.rate = float(setting)
                case "leg" if setting in ("prefill", "decode", "alone"):
                    fault.leg = setting  # type: ignore[assignment]
                case _:
                    raise FaultError(f"{option!r}: options are times=N, rate=P and leg=prefill|decode|alone")
    except ValueError as error:
        if isinstance(error, FaultError):
            raise
        raise FaultError(f"{text!r}: {error}") from None
    if fault.value < 0 or (fault.chunk or 0) < 0:
        raise FaultError(f"{text!r}: numbers must not be negative")
    if kind in ("status", "head") and not 400 <= fault.value <= 599:
        raise FaultError(f"{text!r}: the code must be one of an error, 400 to 599")
    if kind == "slow" and fault.value == 0:
        raise FaultError(f"{text!r}: the factor must be greater than 0")
    return fault


def _chance(request_id: str) -> float:
    """0 to 1, the same for a request in every run."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=4).digest()) / 2**32


def leg_of(kv_params: object) -> Leg:
    """What a request with these kv_transfer_params is to a pair."""
    if isinstance(kv_params, dict):
        if kv_params.get("do_remote_decode") or "disagg_spec" in kv_params:
            return "prefill"
        if kv_params.get("do_remote_prefill") or any(str(k).startswith("lmcache.tag.") for k in kv_params):
            return "decode"
    return "alone"


class Faults:
    """The faults of one engine, and those of the requests that brought their own."""

    def __init__(self) -> None:
        self.engine: list[Fault] = []
        self._own: dict[str, list[Fault]] = {}

    def bring(self, request_id: str, faults: list[Fault]) -> None:
        """A request's own, until `forget`."""
        if faults:
            self._own[request_id] = faults

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)

    def of(self, request_id: str, leg: Leg) -> list[Fault]:
        """Those that break this request's answer on its way, earliest first."""
        mine = [*self._own.get(request_id, ()), *self.engine]
        due = [f for f in mine if f.kind in STREAM_KINDS and f.applies(request_id, leg)]
        return sorted(due, key=lambda fault: -1 if fault.chunk is None else fault.chunk)

    def due(self, kind: str, request_id: str | None, leg: Leg) -> bool:
        """Whether the engine is to misbehave in this way, for this request."""
        return self._find(kind, request_id, leg) is not None

    def value(self, kind: str, request_id: str | None, leg: Leg) -> float:
        """The value of a fault that is due, 0 if none is."""
        fault = self._find(kind, request_id, leg)
        return 0.0 if fault is None else fault.value

    def _find(self, kind: str, request_id: str | None, leg: Leg) -> Fault | None:
        mine = [*self._own.get(request_id or "", ()), *self.engine]
        return next((f for f in mine if f.kind == kind and f.applies(request_id or "", leg)), None)

    @property
    def slowness(self) -> float:
        return next((f.value for f in self.engine if f.kind == "slow"), 1.0)

    @property
    def refusing(self) -> bool:
        return any(f.kind == "refuse" for f in self.engine)
