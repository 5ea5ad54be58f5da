"""docs/resource.md tells the truth about Kubernetes: each field changed, in whole manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest
import yaml

from tandem.api import InvalidResource, read_endpoint
from tandem.api.annotations import PREFIX
from tandem.engine.validation import validate
from tandem.operator import RenderError, render
from tandem.operator.control.desired import desired
from tandem.operator.control.status import new_status

from ..operator.endpoints import SETTINGS, changed
from .fields import Row, is_near, rows, schemas
from .variations import (
    BASES,
    SAMPLES,
    WITHOUT_EFFECT,
    Manifest,
    place,
    sample,
    value_at,
    variants,
    with_sections,
    with_value,
)

Objects = tuple[dict[str, Any], ...]


def objects(manifest: Manifest) -> Objects | None:
    """What is rendered; None of a manifest that cannot be."""
    try:
        return render(read_endpoint(manifest), SETTINGS).objects
    except (InvalidResource, RenderError):
        return None


@cache
def _of_text(manifest: str) -> Objects | None:
    return objects(json.loads(manifest))


def before_it(manifest: Manifest) -> Objects | None:
    """As `objects`, of a manifest that many fields are changed in."""
    return _of_text(json.dumps(manifest))


ROWS = [(row, path) for row in rows() for path in row.paths]
ACTED_ON = [path for row, path in ROWS if row.effect == "acted on"]
PASSED_ON = [path for row, path in ROWS if row.passed]
FOR_THE_OPERATOR = [path for row, path in ROWS if row.effect == "operator"]
WITHOUT_ANY = [pytest.param(row, path, id=path) for row, path in ROWS if row.effect in ("warned", "status")]
SOMETIMES_WITHOUT = [(row.paths[0], rule) for row in rows() for rule, _ in row.unless]


def is_valid(manifest: Manifest) -> bool:
    return not validate(manifest).errors


def warnings(manifest: Manifest, rule: str, path: str) -> list[str]:
    """What is said by a rule of a field, or of what it lies in, or of what lies in it."""
    found = validate(manifest).findings
    return [f.message for f in found if f.rule == rule and f.severity == "warning" and is_near(f.path, path)]


@pytest.mark.parametrize("base", BASES)
def test_the_manifests_can_be_rendered(base: str) -> None:
    assert is_valid(BASES[base])
    assert before_it(BASES[base])


@pytest.mark.parametrize("path", ACTED_ON)
def test_what_is_acted_on_changes_what_is_rendered(path: str) -> None:
    def changes() -> Iterator[Manifest]:
        for base in BASES.values():
            whole = with_sections(base, path)
            before = before_it(whole)
            for after in variants(whole, path):
                made = objects(after)
                if made is not None and before is not None and made != before:
                    yield after

    assert any(is_valid(after) for after in changes())


@pytest.mark.parametrize("path", PASSED_ON)
def test_what_is_passed_on_as_it_is_lies_whole_in_what_is_rendered(path: str) -> None:
    given = SAMPLES.get(path) or sample(path)
    value = yaml.safe_load(given) if path.startswith(PREFIX) else given
    made = [objects(with_value(with_sections(base, path), path, given)) for base in BASES.values()]
    assert any(found and lies_in(value, found) for found in made)


def lies_in(value: Any, whole: Any) -> bool:
    if is_part(value, whole):
        return True
    inner = whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list | tuple) else ()
    return any(lies_in(value, part) for part in inner)


def is_part(value: Any, whole: Any) -> bool:
    """Whether all of a value is there: of an object every field, of a list every item."""
    match value, whole:
        case dict(), dict():
            return all(name in whole and is_part(v, whole[name]) for name, v in value.items())
        case list(), list():
            return all(any(is_part(v, w) for w in whole) for v in value)
    return bool(value == whole)


def validated(manifest: Manifest) -> list[str]:
    """What the condition of that name tells of an endpoint, warning by warning."""
    found = {**manifest, "metadata": {"namespace": "team-a", "uid": "1", **manifest["metadata"]}}
    outcome = desired(found, SETTINGS).outcome
    status = new_status(found, {}, outcome, (), (), {}, paused=False, now=datetime(2026, 11, 30, tzinfo=UTC))
    (message,) = (c["message"] for c in status["conditions"] if c["type"] == "Validated")
    return str(message).split("; ")


LEFT_OUT = "Tandem leaves it out"


def test_what_is_said_of_status_is_what_the_operator_writes() -> None:
    found = BASES["lmcache, s3"] | {"metadata": {"name": "a", "namespace": "team-a", "uid": "1"}}
    made = desired(found, SETTINGS)
    owned = [{**o, "status": {"replicas": 1}} for o in made.objects]
    now = datetime(2026, 11, 30, tzinfo=UTC)
    status = new_status(found, {}, made.outcome, owned, (), {}, paused=False, now=now)
    told = {p: row.does or schemas()[p][0]["description"] for row, p in ROWS if row.effect == "status"}
    left_out = [path for path, words in told.items() if LEFT_OUT in words]
    assert left_out
    assert [path for path in told if value_at({"status": status}, place(path)) is None] == left_out


@pytest.mark.parametrize(("row", "path"), WITHOUT_ANY)
def test_what_has_no_effect_is_told_and_changes_nothing(row: Row, path: str) -> None:
    tried = 0
    for base in BASES.values():
        given = with_value(with_sections(base, path), path, sample(path))
        if is_valid(given):
            tried += 1
            assert objects(given) == before_it(with_value(given, path, ...))
            told = warnings(given, row.rule or "IEC513", path)
            assert told
            # The API server drops a status that a client writes.
            assert row.effect == "status" or any(said.startswith(path) for said in validated(given))
    assert tried


@pytest.mark.parametrize(("row", "path"), WITHOUT_ANY)
def test_so_has_everything_below_it(row: Row, path: str) -> None:
    """What is tried has all that there is."""
    below = [p for p in schemas() if row.covers(p) and p.startswith(path)]
    given = with_value(with_sections(BASES["lmcache, volume"], path), path, sample(path))
    if path not in SAMPLES:
        assert [p for p in below if value_at(given, place(p)) is None] == []


@pytest.mark.parametrize("path", FOR_THE_OPERATOR)
def test_what_only_the_operator_reads_changes_nothing(path: str) -> None:
    for base in BASES.values():
        given = with_value(with_sections(base, path), path, sample(path))
        assert is_valid(given)
        assert objects(given) == before_it(base)


@pytest.mark.parametrize(("path", "rule"), SOMETIMES_WITHOUT)
def test_what_has_no_effect_after_all_is_told_and_changes_nothing(path: str, rule: str) -> None:
    name, changes = WITHOUT_EFFECT[path, rule]
    given = changed(name, changes)
    assert is_valid(given)
    assert warnings(given, rule, path)
    assert value_at(given, place(path)) is not None
    without = with_value(given, path, SAMPLES[path] if schemas()[path][1] else ...)
    assert objects(given) is not None
    assert objects(given) == objects(without)
