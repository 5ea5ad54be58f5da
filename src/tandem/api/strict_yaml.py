"""YAML as kubectl reads it, with the place of every value; JSON is a part of it."""

from __future__ import annotations

import datetime
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


class Loader(yaml.SafeLoader):
    """Goes on where a key is given twice, and notes it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, yaml.Mark]] = []

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        # Here no merge key (`<<`) has been filled in yet: what it brings may be given again.
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
Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
Loader.add_constructor(
    "tag:yaml.org,2002:bool",
    lambda loader, node: node.value.lower() in ("y", "yes", "true", "on"),
)


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
    for key, mark in loader.twice:
        raise yaml.composer.ComposerError(None, None, f"{key!r} is given twice", mark)
    return None if node is None else _document(loader, node, MOST_NODES_OF_A_VALUE)[0]


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
        loader.flatten_mapping(node)
        result = {}
        for key_node, value_node in node.value:
            key = _key(loader, key_node)
            result[key] = _value(loader, value_node, (*at, key), marks, key_node.start_mark)
        return result
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(
            None, None, f"the tag {node.tag} is not known", node.start_mark
        )
    return _scalar(loader, node)


def _scalar(loader: Loader, node: yaml.ScalarNode) -> Any:
    if len(node.value) > MOST_DIGITS and node.tag == "tag:yaml.org,2002:int":
        message = f"a number of {len(node.value)} digits is beyond all use"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
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


def _key(loader: Loader, node: yaml.Node) -> str:
    """A key as JSON has it: text."""
    value = _scalar(loader, node) if isinstance(node, yaml.ScalarNode) else None
    if value is None:
        raise yaml.constructor.ConstructorError(None, None, "a key must be a name", node.start_mark)
    return value if isinstance(value, str) else json.dumps(value)
