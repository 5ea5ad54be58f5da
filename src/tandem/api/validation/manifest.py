"""Reading manifests with the place of every field: YAML as kubectl reads it, or JSON."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tandem.api.crd.structural import Location
from tandem.api.models import GROUP, KIND
from tandem.api.problem import one_line
from tandem.api.strict_yaml import Loader, documents
from tandem.api.validation.report import Finding, Lines, Position

MOST_BYTES = 4 << 20
"""Of one file."""


_BESIDE_SEPARATOR = re.compile(r"^---[ \t]*[^\s#]", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One InferenceEndpointConfig of a file."""

    resource: dict[str, Any]
    lines: Lines

    @property
    def name(self) -> str:
        metadata = self.resource.get("metadata")
        return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


@dataclass
class Manifest:
    """What a file holds."""

    documents: list[Document] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Mistakes that leave nothing to judge, and keys given twice."""
    notes: list[str] = field(default_factory=list)
    """Objects that are not looked at, one line each."""


def file_text(data: bytes) -> str:
    """A file's text. Raises ValueError, which says why it is none that is read."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES >> 20} MiB; API servers take no object so large")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_manifest(text: str, source: str) -> Manifest:
    """Read a file's text; `source` names it in positions. What cannot be read is a finding.

    Objects of other kinds are noted and skipped; those of a List are taken out of it. A document that cannot
    be read ends the file.
    """
    manifest = Manifest()
    text = text.removeprefix("\ufeff")
    in_json = text.lstrip().startswith("{")
    if in_json:
        text = text.replace(
            "\t", " "
        )  # between values JSON allows tabs, YAML does not; in values neither does
    for beside in () if in_json else _BESIDE_SEPARATOR.finditer(text):
        line = text.count("\n", 0, beside.start()) + 1
        message = "--- must stand alone on its line: kubectl takes no document that begins beside it"
        manifest.findings.append(Finding("IEC001", "", message, Position(source, line, 1)))
    loader: Loader | None = None
    try:
        loader = Loader(text)
        for value, marks in documents(loader):
            _add(manifest, value, {at: _position(source, mark) for at, mark in marks.items()})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = _position(source, mark) if mark else Position(source, 1, 1)
        manifest.findings.append(Finding("IEC001", "", _words(error), at))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = Position(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = f"has the character U+{ord(text[error.position]):04X}, which YAML does not allow"
        manifest.findings.append(Finding("IEC001", "", message, at))
    except RecursionError:
        manifest.findings.append(Finding("IEC001", "", "is nested too deeply", Position(source, 1, 1)))
    for key, mark in loader.twice if loader else ():
        message = f"{key!r} is given twice; kubectl takes the last one without a word"
        manifest.findings.append(Finding("IEC002", "", message, _position(source, mark)))
    return manifest


def _position(source: str, mark: yaml.Mark) -> Position:
    return Position(source, mark.line + 1, mark.column + 1)


_ADVICE = {
    r"found character '\t'": "it is a tab; YAML is indented with spaces",
    "mapping values are not allowed": "a ':' ends a key here: look for a wrong indentation, a missing "
    "space after a ':' in the line before, or a value that needs quotes",
    "found '<stream end>'": "the text ends before all is closed: look for a bracket, brace or quote",
    "expected '<document start>'": "begin another document with ---",
    "could not find expected ':'": "a key ends with ':' and a space",
    "a key must be a name": "if {{ }} is a template's, render that first",
}
"""What to do, by what PyYAML says."""


def _words(error: yaml.MarkedYAMLError) -> str:
    """What is wrong with a text that is not YAML, and what to look for."""
    said = " ".join((error.problem or error.context or "is not YAML").split())
    if said.startswith("expected <block end>") and error.context_mark:
        began = error.context_mark.line + 1
        look = "look for a wrong indentation, or a quote that is not closed"
        return f"does not go on with the block that begins in line {began}: {look}"
    advice = next((what for part, what in _ADVICE.items() if part in said), None)
    return f"{said}; {advice}" if advice else said


def _add(manifest: Manifest, value: Any, lines: Lines) -> None:
    """Take the objects of one document in."""
    for at, item in _objects(value, ()):
        within = {place[len(at) :]: position for place, position in lines.items() if place[: len(at)] == at}
        where = within[()]
        kind = item.get("kind") if isinstance(item, dict) else None
        if isinstance(item, dict) and kind == KIND:
            manifest.documents.append(Document(item, within))
        elif item is None:
            continue
        elif _meant(item, kind):
            message = f"is {kind!r}; write {KIND}" if kind else f"is required; write {KIND}"
            manifest.findings.append(Finding("IEC004", "kind", message, within.get(("kind",), where)))
        else:
            what = f"a {kind}" if isinstance(kind, str) and kind else "an object without kind"
            manifest.notes.append(one_line(f"{where}: {what} is not looked at"))


def _objects(value: Any, at: Location) -> Iterator[tuple[Location, Any]]:
    """The objects of a document: of a List its items, else the one."""
    if (
        isinstance(value, dict)
        and value.get("kind") in ("List", f"{KIND}List")
        and isinstance(value.get("items"), list)
    ):
        for i, item in enumerate(value["items"]):
            yield (*at, "items", i), item
    else:
        yield at, value


def _meant(item: Any, kind: Any) -> bool:
    """Whether an object of another kind was meant to be an endpoint: by its group, or by a similar kind."""
    if not isinstance(item, dict):
        return False
    in_group = str(item.get("apiVersion")).partition("/")[0] == GROUP
    near = isinstance(kind, str) and bool(difflib.get_close_matches(kind, [KIND], n=1, cutoff=0.85))
    return near or (in_group and kind is None)
