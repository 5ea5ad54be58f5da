"""The fault matrix: what may break, where, and what must come of it.

A cell is one request that meets one fault. What must come of it is worked out here from the policy of
docs/concepts.md («When something fails») alone; `matrix_bench` finds out what does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Connector = Literal["nixl", "lmcache"]
Phase = Literal[
    "prefill connect", "prefill head", "prefill answer", "hand-off", "decode connect", "decode head",
    "first token", "role event", "mid-stream", "alone connect", "alone head", "alone first token",
    "alone mid-stream",
]  # fmt: skip
Extent = Literal["once", "always"]

CONNECTORS: tuple[Connector, ...] = ("nixl", "lmcache")
SEVERAL = 3
"""Engines of each role where there are several: as many as a request may try."""
MAX_ATTEMPTS = 3
# The deadlines that the router is given, in seconds: all different, so that a wait tells which one it was.
PREFILL, FIRST_TOKEN, IDLE, NOTIFICATION = 5.0, 7.0, 11.0, 3.0
LATE, TOO_LATE = 2.0, 60.0
"""A delay within all of them, and one beyond."""


@dataclass(frozen=True)
class Cell:
    connector: Connector
    engines: int
    """Of each role."""
    fault: str
    """As `FAULTS` names it."""
    phase: Phase
    stream: bool
    extent: Extent
    """The first leg that could meet it does, or each one does, on every engine of the role."""

    @property
    def leg(self) -> str:
        """The kind of leg that is struck."""
        if self.phase == "hand-off":
            return "decode" if self.text.startswith("full-buffer") and self.connector == "nixl" else "prefill"
        return {"prefill": "prefill", "alone": "alone"}.get(self.phase.split()[0], "decode")

    @property
    def place(self) -> str:
        """Where in the answer, as the simulator's grammar has it."""
        return {
            "prefill answer": "@0",
            "first token": "@0",
            "alone first token": "@0",
            "role event": "@1",
        }.get(self.phase, "@2" if "mid-stream" in self.phase else "")

    @property
    def chat(self) -> bool:
        return self.phase == "role event"

    @property
    def text(self) -> str:
        """The fault in the simulator's grammar, without options."""
        return FAULTS[self.fault] + self.place

    @property
    def whole_engine(self) -> bool:
        return self.fault == "refuses connections"

    def __str__(self) -> str:
        many = "one" if self.engines == 1 else "several"
        how = "streamed" if self.stream else "whole"
        return f"{self.connector}-{many}-{self.phase}-{self.fault}-{how}-{self.extent}".replace(" ", "_")


FAULTS: dict[str, str] = {
    "refuses connections": "refuse",
    "hangs": "hang",
    "is late, within the deadline": f"delay={LATE:g}",
    "is late, beyond the deadline": f"delay={TOO_LATE:g}",
    "resets the connection": "reset",
    "closes the connection": "crash",
    "cuts a chunk in two": "truncate",
    "answers 500": "status=500",
    "answers 503": "status=503",
    "answers 400": "status=400",
    "sends the head of a 500 only": "head=500",
    "sends an error with status 200": "error",
    "sends what is not JSON": "badjson",
    "no kv_transfer_params": "no-kv-params",
    "the KV cannot be transferred": "lost-kv",
    "the KV was overwritten": "stale-kv",
    "the lease is over at once": "expired-lease",
    "no room for the KV": "full-buffer",
    "the notification is lost": "lost-notification",
    "the notification is late": f"late-notification={LATE:g}",
    "the notification is too late": f"late-notification={TOO_LATE:g}",
}
_WHEREVER = ("hangs", "is late, within the deadline", "is late, beyond the deadline", "resets the connection",
             "closes the connection")  # fmt: skip
_HEAD = (*_WHEREVER, "answers 500", "answers 503", "answers 400", "sends the head of a 500 only")
_BODY = (*_WHEREVER, "cuts a chunk in two", "sends an error with status 200", "sends what is not JSON")
_CONNECT = ("refuses connections",)
_HAND_OFF = ("the KV cannot be transferred", "the KV was overwritten", "no room for the KV")
_NIXL = ("no kv_transfer_params", "the lease is over at once")
_LMCACHE = ("the notification is lost", "the notification is late", "the notification is too late")

PHASES: dict[Phase, tuple[str, ...]] = {
    "prefill connect": _CONNECT,
    "prefill head": _HEAD,
    # An answer that is not streamed comes all at once or not at all: a delay in it is one before its head.
    "prefill answer": tuple(f for f in _BODY if not f.startswith("is late")),
    "hand-off": (*_HAND_OFF, *_NIXL, *_LMCACHE),
    "decode connect": _CONNECT,
    "decode head": _HEAD,
    "first token": _BODY,
    "role event": _BODY,
    "mid-stream": _BODY,
    "alone connect": _CONNECT,
    "alone head": _HEAD,
    "alone first token": _BODY,
    "alone mid-stream": _BODY,
}


def cells(connector: Connector, engines: int) -> Iterator[Cell]:
    for phase, faults in PHASES.items():
        for fault in faults:
            if fault in (_LMCACHE if connector == "nixl" else _NIXL):
                continue
            for stream in (False, True):
                if stream or phase not in ("role event", "mid-stream", "alone mid-stream"):
                    for extent in ("once", "always"):
                        cell = Cell(connector, engines, fault, phase, stream, extent)
                        if not (cell.whole_engine and engines == 1 and extent == "once"):
                            yield cell


# What comes of it


@dataclass
class Outcome:
    """What one request came to."""

    answer: str
    """`whole`, `error event` (then the connection breaks), `broken off`, `wrong text`, `garbled` (not JSON),
    `unfinished` (it ends well before it is whole), or an error's status."""
    legs: list[str]
    """Kinds of the legs that engines saw, in order: prefill, decode (with a hand-off) or alone."""
    failures: Counter[tuple[str, str]]
    """Legs that failed, by role and cause."""
    counted: tuple[str, str, str]
    """The request, by path, reason and outcome."""
    waits: float
    """Seconds of deadlines and delays in it; what else takes time is less than `SLACK`."""
    left: list[str] = field(default_factory=list)
    """What it left behind."""


SLACK = 1.9


@dataclass(frozen=True)
class _Struck:
    """What becomes of a leg that meets the fault."""

    cause: str = ""
    """Why it fails; nothing: it does not."""
    waits: float = 0.0
    status: int = 502
    """What the client is told if this is the last word."""
    begun: bool = False
    """Whether the client has got a part of the answer by then."""
    answer: str = "whole"


def struck(cell: Cell) -> _Struck:
    """From the fault, where it strikes, and how the answer is sent."""
    prefill = cell.leg == "prefill"
    before_head = cell.phase.endswith("head")
    # What is not streamed is sent when it is complete: a prefill answer, and a streamed one's opposite.
    streamed = cell.stream and not prefill
    begun = "mid-stream" in cell.phase
    if before_head or (not streamed and cell.fault.startswith("is late")):
        silence = _Struck("head_timeout", PREFILL if prefill else FIRST_TOKEN)
    elif prefill:
        silence = _Struck("idle_timeout", PREFILL)
    else:
        silence = _Struck("idle_timeout", FIRST_TOKEN if streamed and not begun else IDLE, begun=begun)
    match cell.fault:
        case "refuses connections":
            return _Struck("connect")
        case "hangs" | "is late, beyond the deadline":
            return silence
        case "is late, within the deadline":
            return _Struck(waits=LATE)
        case "resets the connection" | "closes the connection" | "cuts a chunk in two":
            return _Struck("closed", begun=begun)
        case "sends the head of a 500 only":
            return _Struck("closed")
        case "answers 500":
            return _Struck("status", status=500)
        case "answers 503":
            return _Struck("status", status=503)
        case "answers 400":
            return _Struck("rejected", status=400)
        case "sends an error with status 200":
            if prefill:  # LMCache's prefill answers say nothing that the router needs
                return _Struck("no_kv_params" if cell.connector == "nixl" else "")
            return _Struck("in_band_error", begun=begun)
        case "sends what is not JSON":
            if prefill:
                return _Struck("bad_reply" if cell.connector == "nixl" else "")
            # The client sees it: events of a stream go on as they come.
            return _Struck(answer="garbled") if streamed else _Struck("in_band_error")
    return _between(cell)


def _between(cell: Cell) -> _Struck:
    """Faults of the hand-off itself."""
    nixl = cell.connector == "nixl"
    match cell.fault:
        case "no kv_transfer_params":
            return _Struck("no_kv_params")
        case "the KV cannot be transferred" if nixl:
            # The decoder reads it, so it is the decode leg that fails: after the head, if there is one.
            return _Struck("in_band_error") if cell.stream else _Struck("status", status=500)
        case "no room for the KV" if nixl:
            return _Struck("idle_timeout" if cell.stream else "head_timeout", FIRST_TOKEN)
        case "no room for the KV":
            return _Struck("head_timeout", PREFILL)
        case "the KV was overwritten":
            return _Struck(answer="wrong text")  # no engine notices
        case "the lease is over at once":
            return _Struck()  # nobody else used the blocks
        case "the notification is late":
            return _Struck(waits=LATE)
    return _Struck("no_notification", NOTIFICATION)


def expected(cell: Cell) -> Outcome:
    """What must come of a cell."""
    what = struck(cell)
    if cell.leg == "alone":
        return _alone(cell, what)
    if not what.cause:
        counted = ("disaggregated", "threshold", "ok")
        return Outcome(what.answer, ["prefill", "decode"], Counter(), counted, what.waits)
    decoder_fails = cell.leg == "decode" or (
        cell.phase == "hand-off" and what.cause in ("in_band_error", "status")
    )
    return _decoder_fails(cell, what) if decoder_fails else _prefiller_fails(cell, what)


def _tries(cell: Cell) -> int:
    """Engines of a role that are tried, if all of them fail."""
    return 1 if cell.extent == "once" else min(cell.engines, MAX_ATTEMPTS)


def _legs(cell: Cell, what: _Struck, kind: str, times: int) -> list[str]:
    """Legs that fail; no engine sees those that cannot connect."""
    return [] if what.cause == "connect" else [kind] * times


def _prefiller_fails(cell: Cell, what: _Struck) -> Outcome:
    """Another prefiller; without one, a decoder computes the prompt."""
    if what.cause == "rejected":
        # The decoder is asked, whose word it is; others would say the same.
        failures = Counter({("prefill", "status"): 1})
        return Outcome(
            "whole", ["prefill", "alone"], failures, ("decode_only", "prefill_rejected", "ok"), what.waits
        )
    fail = _tries(cell)
    legs = _legs(cell, what, "prefill", fail)
    failures = Counter({("prefill", what.cause): fail})
    if fail < min(cell.engines, MAX_ATTEMPTS):
        legs += ["prefill", "decode"]
        counted = ("disaggregated", "threshold", "ok")
    else:
        legs += ["alone"]
        counted = ("decode_only", "prefill_failed", "ok")
    return Outcome("whole", legs, failures, counted, fail * what.waits)


def _decoder_fails(cell: Cell, what: _Struck) -> Outcome:
    """A new prefill and another decoder. The last attempt is without a hand-off, which may be what fails; so
    is the second one where there is only one decoder. Nothing is tried again once the client has a part."""
    if what.begun or what.cause == "rejected":
        legs = ["prefill", "decode"]
        return _last_word(what, legs, "decode", ("disaggregated", "threshold"), 1)
    if cell.phase == "decode connect":
        return _no_decoder(cell, what)
    fail = 1 if cell.extent == "once" or cell.engines == 1 else MAX_ATTEMPTS - 1
    legs = ["prefill", "decode"] * fail
    failures = Counter({("decode", what.cause): fail})
    if cell.engines > 1 and cell.extent == "once":
        legs += ["prefill", "decode"]
        counted = ("disaggregated", "threshold", "ok")
    else:
        legs += ["alone"]
        counted = ("decode_only", "handoff_failed", "ok")
    return Outcome("whole", legs, failures, counted, fail * what.waits)


def _no_decoder(cell: Cell, what: _Struck) -> Outcome:
    """One decoder that cannot be reached is not asked again."""
    if cell.engines == 1:
        return _last_word(what, ["prefill"], "decode", ("disaggregated", "threshold"), 1)
    if cell.extent == "once":
        counted = ("disaggregated", "threshold", "ok")
        failures = Counter({("decode", what.cause): 1})
        return Outcome("whole", ["prefill", "prefill", "decode"], failures, counted, 0)
    prefills = ["prefill"] * (MAX_ATTEMPTS - 1)
    return _last_word(what, prefills, "decode", ("decode_only", "handoff_failed"), MAX_ATTEMPTS)


def _alone(cell: Cell, what: _Struck) -> Outcome:
    """A short prompt: another decoder, as long as the client has nothing."""
    path = ("decode_only", "short")
    if not what.cause:
        return Outcome(what.answer, ["alone"], Counter(), (*path, "ok"), what.waits)
    if what.begun or what.cause == "rejected":
        return _last_word(what, ["alone"], "decode", path, 1)
    fail = _tries(cell)
    legs = _legs(cell, what, "alone", fail)
    if fail < min(cell.engines, MAX_ATTEMPTS):
        failures = Counter({("decode", what.cause): fail})
        return Outcome("whole", [*legs, "alone"], failures, (*path, "ok"), fail * what.waits)
    return _last_word(what, legs, "decode", path, fail)


def _last_word(what: _Struck, legs: list[str], role: str, path: tuple[str, str], fail: int) -> Outcome:
    """Nothing more is tried: the engine's own error, or the router's; an event once the answer has begun."""
    if what.cause == "rejected":
        return Outcome(str(what.status), legs, Counter(), (*path, "rejected"), 0)
    answer = "error event" if what.begun else str(what.status)
    failures = Counter({(role, what.cause): fail})
    return Outcome(answer, legs, failures, (*path, "failed"), fail * what.waits)
