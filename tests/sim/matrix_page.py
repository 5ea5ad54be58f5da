"""What was seen of the fault matrix as the tables of docs/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .matrix import FAULTS, SEVERAL, Cell, Connector, Outcome, Phase
from .troubles import Told, Trouble

Seen = Mapping[Cell, Outcome]

PREFILL: dict[Phase, str] = {
    "prefill connect": "connecting",
    "prefill head": "before the head",
    "prefill answer": "in the answer",
}
DECODE: dict[Phase, str] = {
    "decode connect": "connecting",
    "decode head": "before the head",
    "first token": "before the first token",
    "role event": "after a chat's role event",
    "mid-stream": "after the first token",
}
ALONE: dict[Phase, str] = {
    "alone connect": "connecting",
    "alone head": "before the head",
    "alone first token": "before the first token",
    "alone mid-stream": "after the first token",
}
LEGS = {"prefill": PREFILL, "decode": DECODE, "alone": ALONE}


def leg_table(seen: Seen, connector: Connector, engines: int, phases: Mapping[Phase, str]) -> str:
    """Faults by phase of one leg."""
    rows = [("The engine …", *phases.values())]
    for fault in FAULTS:
        row = [_text(seen, connector, engines, fault, phase) for phase in phases]
        if any(row):
            rows.append((fault, *(text or "–" for text in row)))
    return _table(rows)


def handoff_table(seen: Seen, connector: Connector) -> str:
    """Faults between the legs."""
    rows = [
        (fault, text, _text(seen, connector, 1, fault, "hand-off"))
        for fault in FAULTS
        if (text := _text(seen, connector, SEVERAL, fault, "hand-off"))
    ]
    return _table([("Fault", "several engines", "one of each role"), *rows])


def differing_table(seen: Seen) -> str:
    """Cells of the legs in which LMCache differs from NIXL."""
    rows = [("Where", "The engine …", "several engines", "one of each role")]
    for leg, phases in LEGS.items():
        for phase, name in phases.items():
            for fault in FAULTS:
                texts = {
                    c: [_text(seen, c, n, fault, phase) for n in (SEVERAL, 1)] for c in ("nixl", "lmcache")
                }
                if texts["nixl"] != texts["lmcache"]:
                    rows.append((f"{leg} leg, {name}", fault, *texts["lmcache"]))
    return _table(rows)


def troubles_table(seen: Mapping[tuple[Trouble, Connector], Told]) -> str:
    rows = [("Trouble", "What clients get", "Requests counted", "Failed legs")]
    for (trouble, connector), told in seen.items():
        same = connector == "lmcache" and seen.get((trouble, "nixl")) == told
        if not same:
            only = " (LMCache)" if connector == "lmcache" else " (NIXL)" if trouble.only else ""
            rows.append((trouble.name + only, *_told(told)))
    return _table(rows)


def _told(told: Told) -> tuple[str, str, str]:
    counted = (f"`{'/'.join(labels)}`{_times(n)}" for labels, n in sorted(told.counted.items()))
    failures = (f"`{role}/{cause}`{_times(n)}" for (role, cause), n in sorted(told.failures.items()))
    answers = (f"{_ANSWERS.get(a, a)}{_times(n)}" for a, n in Counter(told.answers).items())
    return "; ".join(answers) or "–", ", ".join(counted), ", ".join(failures) or "–"


def _times(n: int) -> str:
    return f" × {n}" if n > 1 else ""


# The text of a cell


_ANSWERS = {
    "whole": "200",
    "error event": "error event, broken off",
    "garbled": "200, with an event that is not JSON",
    "wrong text": "200 with a wrong text",
}


def _text(seen: Seen, connector: Connector, engines: int, fault: str, phase: Phase) -> str:
    """What comes of a fault in a phase, streamed or not, once or always."""
    found = {
        cell: outcome
        for cell, outcome in seen.items()
        if (cell.connector, cell.engines, cell.fault, cell.phase) == (connector, engines, fault, phase)
    }
    if not found:
        return ""
    texts = {(cell.extent, cell.stream): _came(cell, outcome) for cell, outcome in found.items()}
    causes = dict.fromkeys(f"`{cause}`" for outcome in found.values() for _, cause in outcome.failures)
    return " ".join([_merged(texts), *sorted(causes)])


def _merged(texts: Mapping[tuple[str, bool], str]) -> str:
    """Told apart only by what makes a difference."""
    by_stream = [_by_extent({e: t for (e, s), t in texts.items() if s is stream}) for stream in (True, False)]
    told = {how: text for how, text in zip(("streamed", "whole"), by_stream, strict=True) if text}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return ". ".join(f"{how.capitalize()}: {text}" for how, text in told.items())


def _by_extent(texts: Mapping[str, str]) -> str:
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    return f"{texts['once']}; if all do: {texts['always']}"


def _came(cell: Cell, outcome: Outcome) -> str:
    answer = _ANSWERS.get(outcome.answer, outcome.answer)
    if outcome.answer != "whole" or not outcome.failures:
        return answer
    if cell.leg != "alone" and outcome.legs[-1] == "alone":
        return "a decoder alone"
    return f"another {_noun(cell, outcome)}"


def _noun(cell: Cell, outcome: Outcome) -> str:
    """What was tried again."""
    if cell.leg == "alone":
        return "decoder"
    return "prefiller" if all(role == "prefill" for role, _ in outcome.failures) else "pair"


def _table(rows: Sequence[Iterable[str]]) -> str:
    head, *body = (list(row) for row in rows)
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
