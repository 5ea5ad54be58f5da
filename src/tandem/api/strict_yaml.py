"""YAML as kubectl reads it, with the place of every value; JSON is a part of it."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tandem.api.crd.structural import Location

MOST_NODES = 1_000_000
"""The most values that a document may have, with what aliases repeat."""

MOST_NODES_OF_A_VALUE = 20_000
"""The same of a short text, as an annotation has it; API servers take 256 KiB of those."""

MOST_DIGITS = 400
"""Of a whole number; the largest that JSON's readers take have 309."""

Marks = dict[Location, yaml.Mark]
"""Where each part of a value stands: the place of its key, or of the list's item."""

_BREAKS = "\r\n\x85\u2028\u2029"
_MERGE = "tag:yaml.org,2002:merge"


class Loader(yaml.SafeLoader):
    """Goes on where a key is given twice, and notes it; takes what kubectl's reader takes and PyYAML's does
    not: tabs between words, anchors that are set again."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, yaml.Mark]] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if not self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            self.anchors.pop(event.anchor, None)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    self.twice.append((key.value, key.start_mark))
                seen.add(key.value)
        return node

    def scan_to_next_token(self) -> None:
        if self.index == 0 and self.peek() == "\ufeff":
            self.forward()
        while True:
            # Where a block's indentation may stand a tab is a mistake.
            blanks = " \t" if self.flow_level or not self.allow_simple_key else " "
            while self.peek() in blanks:
                self.forward()
            if self.peek() == "#":
                while self.peek() not in f"\0{_BREAKS}":
                    self.forward()
            if not self.scan_line_break():  # type: ignore[no-untyped-call]
                return
            if not self.flow_level:
                self.allow_simple_key = True

    def scan_plain(self) -> yaml.ScalarToken:
        token = super().scan_plain()
        beside = self.flow_level and self.index == token.end_mark.index
        if beside and self.peek() == ":" and self.peek(1) in ",[]{}":
            # No blank follows, so the colon is of the word: {a:} has the key `a:`.
            token.value += ":"
            self.forward()
        return token

    def scan_plain_spaces(self, indent: int, start_mark: yaml.Mark) -> list[str]:
        blanks = 0
        while self.peek(blanks) in " \t":
            blanks += 1
        spaces = self.prefix(blanks)
        if "\t" in spaces:
            self.forward(blanks)
            if self.peek() not in _BREAKS:
                return [spaces]
        return super().scan_plain_spaces(indent, start_mark) or []

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        at = self.get_mark()
        try:
            chunks: list[str] = super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError):
            message = "found an escape of a character that there is not"
            raise yaml.scanner.ScannerError(None, None, message, at) from None
        return chunks


# kubectl's own reading of plain scalars: y and n are booleans, 1e3 is a number, 10:30 is text.
_RESOLVERS = [
    (
        "bool",
        r"y|Y|n|N|(?:yes|no|true|false|on|off)|(?:Yes|No|True|False|On|Off)|(?:YES|NO|TRUE|FALSE|ON|OFF)",
        "yYnNtTfFoO",
    ),
    (
        "int",
        r"[-+]?_*(?:0b_*[01][01_]*|0o?_*[0-7][0-7_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0_*|[1-9][0-9_]*)",
        "-+0123456789",
    ),
    (
        "float",
        r"[-+]?_*(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9][0-9_]*)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", "<<", "<"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
]
_WRITTEN = {f"tag:yaml.org,2002:{name}": re.compile(pattern) for name, pattern, _ in _RESOLVERS}
"""How a value of each kind is written, also where its tag says so."""

Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
Loader.add_constructor(
    "tag:yaml.org,2002:bool",
    lambda loader, node: node.value.lower() in ("y", "yes", "true", "on"),
)
Loader.add_constructor(
    "tag:yaml.org,2002:binary",
    lambda loader, node: base64.b64decode(re.sub(r"[\r\n]", "", node.value), validate=True).decode(
        errors="replace"
    ),
)
for _name in ("merge", "timestamp"):  # one is no value, of the other JSON has the text
    Loader.add_constructor(f"tag:yaml.org,2002:{_name}", lambda loader, node: node.value)


def documents(loader: Loader) -> Iterator[tuple[Any, Marks]]:
    """The documents of a text that are not empty. Raises yaml.YAMLError at the first mistake, and
    RecursionError."""
    while loader.check_node():
        node = loader.get_node()
        if node is not None and loader.yaml_version not in (None, (1, 1)):
            message = "kubectl reads YAML 1.1 alone; leave the line that begins with %YAML out"
            raise yaml.composer.ComposerError(None, None, message, node.start_mark)
        if node is not None:
            yield _document(loader, node)


def read_value(text: str) -> Any:
    """The value of a short text with one document, as an annotation has it; None of one that is empty.

    Raises yaml.YAMLError, also where a key is given twice, and RecursionError.
    """
    loader = Loader(text)
    node = loader.get_single_node()
    value = None if node is None else _document(loader, node, MOST_NODES_OF_A_VALUE)[0]
    for key, mark in loader.twice:
        raise yaml.composer.ComposerError(None, None, f"{key!r} is given twice", mark)
    return value


def _document(loader: Loader, node: yaml.Node, most: int = MOST_NODES) -> tuple[Any, Marks]:
    _refuse_bombs(node, {}, [], most)
    marks: Marks = {}
    return _value(loader, node, (), marks, node.start_mark), marks


def _refuse_bombs(node: yaml.Node, sizes: dict[int, int], around: list[int], most: int) -> int:
    """How many values a node stands for, aliases repeated. Raises where it holds itself, or is too large."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in around:
        raise yaml.composer.ComposerError(None, None, "an anchor's value contains itself", node.start_mark)
    if id(node) in sizes:
        return sizes[id(node)]
    around.append(id(node))
    inner = [n for pair in node.value for n in pair] if isinstance(node, yaml.MappingNode) else node.value
    size = 1 + sum(_refuse_bombs(n, sizes, around, most) for n in inner)
    around.pop()
    if size > most:
        message = f"holds more than {most:,} values, with what aliases repeat"
        raise yaml.composer.ComposerError(None, None, message, node.start_mark)
    sizes[id(node)] = size
    return size


def _value(loader: Loader, node: yaml.Node, at: Location, marks: Marks, mark: yaml.Mark) -> Any:
    marks[at] = mark
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_value(loader, item, (*at, i), marks, item.start_mark) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _object(loader, node, at, marks)
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(
            None, None, f"the tag {node.tag} is not known", node.start_mark
        )
    return _scalar(loader, node)


def _object(loader: Loader, node: yaml.MappingNode, at: Location, marks: Marks) -> dict[str, Any]:
    """What comes later counts, also where a merge key brings it; YAML itself would have the key's own value
    count."""
    result: dict[str, Any] = {}
    own: set[str] = set()
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE:
            for part in _merged(value_node):
                brought = _object(loader, part, at, marks)
                loader.twice += [(key, key_node.start_mark) for key in brought if key in own]
                result |= brought
        else:
            key = _key(loader, key_node)
            own.add(key)
            result[key] = _value(loader, value_node, (*at, key), marks, key_node.start_mark)
    return result


def _merged(node: yaml.Node) -> list[yaml.MappingNode]:
    """What a merge key names, in the order in which it counts: the first of a list is the strongest."""
    merged = []
    for part in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(part, yaml.MappingNode):
            message = "expected an object, or a list of objects, to merge"
            raise yaml.constructor.ConstructorError(None, None, message, part.start_mark)
        merged.append(part)
    return merged


def _scalar(loader: Loader, node: yaml.ScalarNode) -> Any:
    if len(node.value) > MOST_DIGITS and node.tag == "tag:yaml.org,2002:int":
        message = f"a number of {len(node.value)} digits is beyond all use"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
    if node.tag in _WRITTEN and not _WRITTEN[node.tag].fullmatch(node.value):
        message = f"{node.value!r} is not what its tag says, {node.tag.rpartition(':')[2]}"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
    try:
        value = loader.construct_object(node)
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = _as_float(value)  # as Go reads it
    match value:
        case float() if math.isinf(value) and "inf" not in node.value.lower():
            return node.value  # so large that Go takes it for text
        case float() if not math.isfinite(value):
            message = f"{node.value} is not a number that JSON has"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        case str():  # the halves of a character that JSON escapes as two are put together
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _key(loader: Loader, node: yaml.Node) -> str:
    """A key as JSON has it: text."""
    value = _scalar(loader, node) if isinstance(node, yaml.ScalarNode) else None
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"  # nearly as Go writes one of 32 bits: 1e3 is 1000
        case int() if value < 2**63:  # true and false are some
            return json.dumps(value)
    raise yaml.constructor.ConstructorError(None, None, "a key must be a name", node.start_mark)
