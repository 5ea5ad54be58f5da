"""Reading manifests with the place of every field: YAML as kubectl reads it, or JSON."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tandem.api.crd.structural import Location
from tandem.api.load import StrictLoader
from tandem.api.models import GROUP, KIND
from tandem.api.validation.report import Finding, Lines, Position

MOST_NODES = 1_000_000
"""The most values that a document may have, with what aliases repeat."""


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
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                _add(manifest, loader, node, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Position(source, mark.line + 1, mark.column + 1) if mark else Position(source, 1, 1)
        manifest.findings.append(Finding("IEC001", "", _words(error.problem or error.context), at))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = Position(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = f"has the character U+{ord(text[error.position]):04X}, which YAML does not allow"
        manifest.findings.append(Finding("IEC001", "", message, at))
    except RecursionError:
        manifest.findings.append(Finding("IEC001", "", "is nested too deeply", Position(source, 1, 1)))
    for key, mark in loader.twice if loader else ():
        at = Position(source, mark.line + 1, mark.column + 1)
        manifest.findings.append(
            Finding("IEC002", "", f"{key!r} is given twice; kubectl takes the last one without a word", at)
        )
    return manifest


def _words(text: str | None) -> str:
    return " ".join((text or "is not YAML").split())


def _add(manifest: Manifest, loader: _Loader, node: yaml.Node, source: str) -> None:
    """Take the objects of one document in."""
    _refuse_bombs(node, {}, [])
    lines: dict[Location, Position] = {}
    value = _value(loader, node, (), lines, source)
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
            manifest.notes.append(f"{where}: {what} is not looked at")


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


def _refuse_bombs(node: yaml.Node, sizes: dict[int, int], around: list[int]) -> int:
    """How many values a node stands for, aliases repeated. Raises where it holds itself, or is too large."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in around:
        raise yaml.composer.ComposerError(None, None, "an anchor's value contains itself", node.start_mark)
    if id(node) in sizes:
        return sizes[id(node)]
    around.append(id(node))
    inner = [n for pair in node.value for n in pair] if isinstance(node, yaml.MappingNode) else node.value
    size = 1 + sum(_refuse_bombs(n, sizes, around) for n in inner)
    around.pop()
    if size > MOST_NODES:
        raise yaml.composer.ComposerError(None, None, "aliases make it too large", node.start_mark)
    sizes[id(node)] = size
    return size


def _value(
    loader: _Loader,
    node: yaml.Node,
    at: Location,
    lines: dict[Location, Position],
    source: str,
    mark: Any = None,
) -> Any:
    """A node's value, with the place of each part: that of its key, or of the list's item."""
    mark = mark or node.start_mark
    lines[at] = Position(source, mark.line + 1, mark.column + 1)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_value(loader, item, (*at, i), lines, source) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        loader.flatten_mapping(node)
        result = {}
        for key_node, value_node in node.value:
            key = _key(loader, key_node)
            result[key] = _value(loader, value_node, (*at, key), lines, source, key_node.start_mark)
        return result
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(
            None, None, f"the tag {node.tag} is not known", node.start_mark
        )
    return _scalar(loader, node)


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    try:
        value = loader.construct_object(node)
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = _as_float(value)  # as Go reads it
    match value:
        case float() if not math.isfinite(value):
            message = f"{node.value} is not a number that JSON has"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        case str():  # the halves of a character that JSON escapes as two are put together
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case bytes():
            return value.decode(errors="replace")
        case datetime.date():
            return node.value
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _key(loader: _Loader, node: yaml.Node) -> str:
    """A key as JSON has it: text."""
    value = _scalar(loader, node) if isinstance(node, yaml.ScalarNode) else None
    if value is None:
        raise yaml.constructor.ConstructorError(None, None, "a key must be a name", node.start_mark)
    return value if isinstance(value, str) else json.dumps(value)


class _Loader(StrictLoader):
    """Reads as kubectl does, and goes on where a key is given twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, yaml.Mark]] = []

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = yaml.SafeLoader.compose_mapping_node(self, anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    self.twice.append((key.value, key.start_mark))
                seen.add(key.value)
        return node


# kubectl's own reading of plain scalars: y and n are booleans, 1e3 is a number, 10:30 is text.
_RESOLVERS = [
    (
        "bool",
        r"y|Y|n|N|(?:yes|no|true|false|on|off)|(?:Yes|No|True|False|On|Off)|(?:YES|NO|TRUE|FALSE|ON|OFF)",
        "yYnNtTfFoO",
    ),
    ("int", r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", "<<", "<"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
]
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(
    "tag:yaml.org,2002:bool",
    lambda loader, node: node.value.lower() in ("y", "yes", "true", "on"),
)
