"""A report as text: for people, as JSON, as GitHub's workflow commands, and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from tandem.api.validation.report import Finding, Report
from tandem.api.validation.rules import RULES


def human(report: Report) -> str:
    """One line a finding; nothing where there are none."""
    return "".join(f"{finding}\n" for finding in report.findings)


def counts(report: Report, endpoints: int) -> str:
    """`2 endpoints: 1 error, 3 warnings`."""
    told = [
        f"{len(found)} {word}{'' if len(found) == 1 else 's'}"
        for found, word in ((report.errors, "error"), (report.warnings, "warning"))
    ]
    return f"{endpoints} endpoint{'' if endpoints == 1 else 's'}: {', '.join(told)}"


def as_json(report: Report, endpoints: int, notes: Iterable[str] = ()) -> str:
    found = {
        "endpoints": endpoints,
        "errors": len(report.errors),
        "warnings": len(report.warnings),
        "findings": [finding.as_dict() for finding in report.findings],
        "notes": list(notes),
    }
    return json.dumps(found, indent=2) + "\n"


def github(report: Report) -> str:
    """Workflow commands, which GitHub Actions shows beside the lines of a change."""
    return "".join(f"{_command(finding)}\n" for finding in report.findings)


def _command(finding: Finding) -> str:
    place = finding.position
    properties = {"file": place.file, "line": place.line, "col": place.column} if place else {}
    properties["title"] = f"{finding.rule}: {RULES[finding.rule].title}"
    listed = ",".join(f"{name}={_escaped(value, more=':,')}" for name, value in properties.items())
    return f"::{finding.severity} {listed}::{_escaped(finding.said)}"


def _escaped(value: object, more: str = "") -> str:
    text = str(value).replace("%", "%25")
    for character in f"\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def sarif(report: Report) -> str:
    """SARIF 2.1.0, as code scanning takes it: one run, every rule that there is, every finding."""
    order = list(RULES)
    driver = {
        "name": "tandem validate",
        "version": version("tandem-dpd"),
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": rule.title},
                "defaultConfiguration": {"level": rule.severity},
            }
            for rule in RULES.values()
        ],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, order.index(finding.rule)) for finding in report.findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _result(finding: Finding, index: int) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if finding.position:
        file, line, column = finding.position
        location["physicalLocation"] = {
            "artifactLocation": {"uri": quote(PurePath(file).as_posix(), errors="surrogateescape")},
            "region": {"startLine": line, "startColumn": column},
        }
    if finding.path:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.path}]
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": str(finding.severity),
        "message": {"text": finding.said},
        "locations": [location] if location else [],
    }
