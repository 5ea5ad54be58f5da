"""What validation says: findings with a rule, a severity, a field path and, if known, a place in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from tandem.api.crd.structural import Location
from tandem.api.problem import field_path, one_line
from tandem.api.validation.rules import RULES


class Severity(StrEnum):
    ERROR = "error"
    """The resource is refused: the API server would refuse it, or it can never work."""
    WARNING = "warning"
    """It is taken; something in it has no effect, or works otherwise than it looks."""


class Position(NamedTuple):
    """A place in a file; lines and columns count from 1, columns in characters."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


MOST_FINDINGS = 500
"""Errors of one resource, and warnings, that are told."""

LONGEST_TEXT = 1000
"""Characters of a message or a path that are told."""

Lines = Mapping[Location, Position]
"""Where in a file each part of a resource stands, by its location: ('spec', 'tags', 0, 'name')."""


class Found(NamedTuple):
    """What a check yields: a rule that is broken, where in the resource, and what to say."""

    rule: str
    at: Location
    message: str


@dataclass(frozen=True)
class Finding:
    """One mistake, or one warning."""

    rule: str
    """The rule's id, as IEC101. Ids stay as they are from release to release."""
    path: str
    """The field, as `spec.tags[0].name`; "" when the finding is about a file."""
    message: str
    """What is wrong and what to do; it reads on after `path: `."""
    position: Position | None = None
    """None where there is no file, as in admission."""

    @property
    def severity(self) -> Severity:
        return Severity(RULES[self.rule].severity)

    @property
    def said(self) -> str:
        """The field and what is wrong with it, on one line."""
        return one_line(f"{self.path}: {self.message}" if self.path else self.message)

    def __str__(self) -> str:
        place = one_line(f"{self.position}: ") if self.position else ""
        return f"{place}{self.severity} {self.rule} {self.said}"

    def as_dict(self) -> dict[str, Any]:
        position = self.position._asdict() if self.position else {"file": None, "line": None, "column": None}
        return {
            "rule": self.rule,
            "severity": str(self.severity),
            "path": self.path,
            "message": self.message,
            **position,
        }


@dataclass(frozen=True)
class Report:
    """Everything that was found, in the order of the file where positions are known."""

    findings: tuple[Finding, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity is Severity.WARNING)

    @property
    def ok(self) -> bool:
        """Whether the resource is accepted; warnings do not count."""
        return not self.errors

    def __add__(self, other: Report) -> Report:
        return Report(self.findings + other.findings)


def report(found: Iterable[Found], lines: Lines | None = None) -> Report:
    """Findings with path and place, each once, in the order of the file."""
    findings = [
        Finding(rule, _cut(shown_path(at)), _cut(message), position_of(at, lines or {}))
        for rule, at, message in dict.fromkeys(_first(found))
    ]
    if lines:
        findings.sort(key=lambda f: f.position[1:] if f.position else (0, 0))
    return Report(tuple(findings))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


def _first(found: Iterable[Found]) -> Iterator[Found]:
    """The first of each severity. Beyond so many errors nothing more is looked for."""
    told = dict.fromkeys(Severity, 0)
    for rule, at, message in found:
        severity = Severity(RULES[rule].severity)
        told[severity] += 1
        if told[severity] == MOST_FINDINGS:
            message += f". There are more {severity}s than these {MOST_FINDINGS}; they are not told"
        if told[severity] <= MOST_FINDINGS:
            yield Found(rule, at, message)
        elif severity is Severity.ERROR:
            return


def position_of(at: Location, lines: Lines) -> Position | None:
    """The place of a part of the resource, or of the nearest part around it: a missing field has none."""
    for depth in range(len(at), -1, -1):
        if at[:depth] in lines:
            return lines[at[:depth]]
    return None


def shown_path(at: Location) -> str:
    """A field path in which the name of an annotation stands in brackets, as it has dots."""
    if at[:2] in (("metadata", "annotations"), ("metadata", "labels")) and len(at) > 2:
        rest = field_path(at[3:]) if at[3:] else ""
        dot = "." if rest and not rest.startswith("[") else ""
        return f"{field_path(at[:2])}[{at[2]}]{dot}{rest}"
    return field_path(at)
