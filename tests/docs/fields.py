"""What Tandem does with each field of the resource: fields.yaml, read, and laid beside the schema.

docs/resource.md shows it. Paths are `spec.pdSpec.routingThreshold`, `spec.tags[].name` and, for annotations,
`tandem.dev/connector`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tandem.api.annotations import PREFIX, known_annotations
from tandem.api.conversion import ANNOTATION_V1_FIELDS
from tandem.api.crd import spec_and_status
from tandem.api.crd.schemas import Schema, fields

HERE = Path(__file__).parent

HYPERPOD = dict(
    line.split(": ", 1)
    for line in (HERE.parent / "api" / "iec-v1-fields.txt").read_text("utf-8").splitlines()[1:]
)
"""Every field of HyperPod's v1: its path, and its type with facts."""

EFFECTS = ("acted on", "warned", "operator", "status")
"""On Kubernetes."""

LOCAL = ("acted on", "listed", "not needed")
"""On one machine."""

WHOLE = ".*"
"""At the end of a row's field: with everything below it."""


@dataclass(frozen=True)
class Row:
    """What is done with a field, which lies below each of `under`."""

    under: tuple[str, ...]
    field: str
    type: str = ""
    effect: str = "acted on"
    does: str = ""
    rule: str | None = None
    passed: bool = False
    unless: tuple[tuple[str, str], ...] = ()
    here: str = ""
    local: str = "listed"

    @property
    def paths(self) -> tuple[str, ...]:
        """The field itself, wherever it is."""
        return tuple(_joined(root, self.field.removesuffix(WHOLE)) for root in self.under)

    def covers(self, path: str) -> bool:
        whole = self.field.endswith(WHOLE)
        return any(path == p or (whole and _is_below(path, p)) for p in self.paths)

    @property
    def rules(self) -> set[str]:
        """Those of `tandem validate` that the row speaks of."""
        named = re.findall(r"IEC\d{3}", self.does)
        return {*named, *(rule for rule, _ in self.unless), *([self.rule] if self.rule else [])}


@dataclass(frozen=True)
class Section:
    title: str
    under: tuple[str, ...]
    about: str
    where: str
    rows: tuple[Row, ...]


def _joined(root: str, field: str) -> str:
    if field == ".":
        return root
    return f"{root}{field}" if root.startswith(PREFIX) else f"{root}.{field}"


def is_near(found: str, path: str) -> bool:
    """Whether a path as findings have it (`spec.tags[0].name`) is a field's, or above or below it."""
    told = re.sub(r"^metadata\.annotations\[([^]]*)\]", r"\1", found)
    told = re.sub(r"\[\d+\]", "[]", told)
    return told == path or _is_below(told, path) or _is_below(path, told)


def _is_below(path: str, above: str) -> bool:
    return path.startswith((f"{above}.", f"{above}[]"))


@cache
def sections() -> tuple[Section, ...]:
    read = yaml.safe_load((HERE / "fields.yaml").read_text("utf-8"))
    return tuple(_section(given) for given in read)


def _section(given: dict[str, Any]) -> Section:
    under = tuple(given.pop("under"))
    made = []
    for row in given.pop("rows"):
        unless = tuple(row.pop("unless", {}).items())
        local = row.pop("local", "acted on" if "here" in row else "listed")
        made.append(Row(under, unless=unless, local=local, **row))
    return Section(under=under, rows=tuple(made), **{"about": "", "where": "", **given})


def rows() -> tuple[Row, ...]:
    return tuple(row for section in sections() for row in section.rows)


@cache
def schemas() -> dict[str, tuple[Schema, bool]]:
    """Every field of v1 as Tandem has it, and every annotation: its schema, and whether it is required."""
    found = {
        path: (schema, required)
        for path, schema, required in fields(spec_and_status())
        if re.match(r"(spec|status)\b", path)
    }
    found |= {f"{PREFIX}{name}": (schema, False) for name, schema in known_annotations().items()}
    return found | {ANNOTATION_V1_FIELDS: ({"type": "string"}, False)}


def described(row: Row) -> tuple[str, str]:
    """Type and default of a row's field in words; the same wherever the field is."""
    ((kind, default),) = {_described(path) for path in row.paths}
    return row.type or kind, default


def _described(path: str) -> tuple[str, str]:
    schema, required = schemas()[path]
    default = "required" if required else f"`{_text(schema['default'])}`" if "default" in schema else ""
    return _type(path, schema), default


def _type(path: str, schema: Schema) -> str:
    core = HYPERPOD.get(path, "").partition('core="')[2].rstrip('"')
    if core:
        return core
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        inner = schema["items"]["type"]
        return f"[]{inner}"
    if "additionalProperties" in schema:
        return f"map of {schema['additionalProperties']['type']}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f"{low}–{high}" if None not in (low, high) else f"at least {low}" if low is not None else ""
    return f"{schema['type']}, {bounds}" if bounds else str(schema["type"])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else '""' if value == "" else str(value)


def page() -> str:
    """The sections of docs/resource.md."""
    return "\n".join(_shown(section) for section in sections())


def _shown(section: Section) -> str:
    where = section.where or f"Below {', '.join(f'`{root}`' for root in section.under)}."
    intro = f"{where} {section.about}".rstrip()
    head = "| Field | Type | Default | Effect | On Kubernetes | On one machine |\n|---|---|---|---|---|---|\n"
    return f"### {section.title}\n{intro}\n\n{head}{''.join(map(_line, section.rows))}"


def _line(row: Row) -> str:
    kind, default = described(row)
    name = row.under[0] if row.field == "." else row.field
    does = row.does or _description(row)
    if row.passed:
        does = f"as it is: {does}"
    if row.effect == "warned":
        does = f"no effect ({row.rule}): {does}"
    does += "".join(f"; no effect {when} ({rule})" for rule, when in row.unless)
    cells = (f"`{name}`", kind, default, row.effect, does, row.here or row.local)
    assert not any("|" in cell or "\n" in cell for cell in cells), cells
    return f"| {' | '.join(cells)} |\n"


def _description(row: Row) -> str:
    """The schema's, as a cell has it."""
    (text,) = {schemas()[path][0]["description"] for path in row.paths}
    first = str(text).removesuffix(".")
    return first[0].lower() + first[1:] if not first[:2].isupper() else first
