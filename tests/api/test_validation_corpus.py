"""Good and bad manifests, judged by `validate` and by a real API server.

A file of corpus/ begins with what it is about and what `validate` must find in it, one finding a line. The
API server must refuse what breaks one of its rules (`Rule.api_server`) and take everything else: that is the
whole difference between the two.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.api.crd import spec_and_status
from tandem.api.models import VERSIONS
from tandem.api.validation import RULES, Finding, read_manifest
from tandem.api.validation.schema import TWINS
from tandem.engine.validation import validate

from .conftest import ApiServer

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.yaml"))
EXPECTED = re.compile(r"# (error|warning) (IEC\d+)(?: (\S.*))?")
PATHS = re.compile(r'(?:^|[\s"])((?:apiVersion|kind|metadata|spec|status)[\w.\[\]/-]*)(?=: |")')


def expected(text: str) -> list[tuple[str, str, str]]:
    """(severity, rule, path) of each finding that a file's head announces."""
    head = [line for line in text.splitlines() if line.startswith("#")]
    return [(m[1], m[2], m[3] or "") for line in head if (m := EXPECTED.fullmatch(line))]


def judged(text: str) -> list[Finding]:
    manifest = read_manifest(text, "x.yaml")
    found = list(manifest.findings)
    for document in manifest.documents:
        found += validate(document.resource, lines=document.lines).findings
    return found


def by_id(path: Path) -> str:
    return path.stem


def test_the_corpus_is_large_and_shows_every_rule() -> None:
    assert len(CORPUS) >= 80
    shown = {rule for file in CORPUS for _, rule, _ in expected(file.read_text("utf-8"))}
    assert set(RULES) - shown == {"IEC003"}, (
        "that a file holds no endpoint, the command says of all files together"
    )


@pytest.mark.parametrize("file", CORPUS, ids=by_id)
def test_validate_finds_what_is_wrong_and_nothing_else(file: Path) -> None:
    text = file.read_text("utf-8")
    found = [(str(f.severity), f.rule, f.path) for f in judged(text)]
    assert sorted(found) == sorted(expected(text))
    kind = file.stem.partition("-")[0]
    severities = {severity for severity, _, _ in found}
    assert severities == {"good": set(), "warn": {"warning"}}.get(kind, severities | {"error"})


@pytest.mark.parametrize("file", CORPUS, ids=by_id)
def test_the_api_server_refuses_the_same_but_for_what_only_validate_sees(
    api_server: ApiServer, file: Path
) -> None:
    text = file.read_text("utf-8")
    done = api_server.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    wrong = [f for f in judged(text) if f.severity == "error"]
    refused = any(RULES[f.rule].api_server for f in wrong)
    assert (done.returncode != 0) == refused, done.stderr
    assert refused == file.stem.startswith("bad-")
    if refused and "is invalid" in done.stderr:
        told = set(PATHS.findall(done.stderr))
        paths = [re.sub(r"^(metadata\.\w+)\[.*", r"\1", f.path) for f in wrong]
        assert [path for path in told if path not in paths] == [], (
            "validate tells all that the API server tells"
        )


def rules_in_cel() -> set[tuple[str, str]]:
    """Text and message of each rule of either version."""

    def within(schema: dict[str, object]) -> set[tuple[str, str]]:
        found = set()
        for key, value in schema.items():
            if key == "x-kubernetes-validations" and isinstance(value, list):
                found |= {(rule["rule"], rule["message"]) for rule in value}
            elif isinstance(value, dict):
                found |= within(value)
        return found

    return set().union(*(within(spec_and_status(version)) for version in VERSIONS))


def test_every_rule_in_cel_has_its_twin_and_a_manifest_that_breaks_it() -> None:
    """The manifests are judged by the API server above, with path and all."""
    assert {text for text, _ in rules_in_cel()} == set(TWINS)
    broken = [f for file in CORPUS for f in judged(file.read_text("utf-8"))]
    for text, message in rules_in_cel():
        assert any(f.rule == TWINS[text][0] and f.message == message for f in broken), text


TWIN_RULES = {rule for rule, _ in TWINS.values()} - {"IEC102"}


def errors_expected(file: Path) -> set[str]:
    return {rule for severity, rule, _ in expected(file.read_text("utf-8")) if severity == "error"}


BREAKING_TWINS = [file for file in CORPUS if (found := errors_expected(file)) and found <= TWIN_RULES]
"""Files in which nothing else is wrong: there the API server comes to its rules in CEL."""


def test_every_twin_is_looked_at_alone() -> None:
    assert set().union(*map(errors_expected, BREAKING_TWINS)) == TWIN_RULES


@pytest.mark.parametrize("file", BREAKING_TWINS, ids=by_id)
def test_the_twins_agree_with_the_rules_one_by_one(api_server: ApiServer, file: Path) -> None:
    """The API server names those broken, in the same words."""
    text = file.read_text("utf-8")
    done = api_server.kubectl("create", "--dry-run=server", "-f", "-", stdin=text)
    for finding in judged(text):
        if finding.severity == "error":
            assert f"{finding.path}: " in done.stderr
            assert finding.message in done.stderr
