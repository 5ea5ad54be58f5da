"""Lists that people write into files: YAML, of which JSON is a part, read strictly. Every value is text,
whether quoted or not; a mistake is told with its line and its path."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import yaml

from tandem.router.few import few

try:
    from yaml import CBaseLoader as _Loader
except ImportError:  # a PyYAML without libyaml: the same, ten times slower
    from yaml import BaseLoader as _Loader  # type: ignore[assignment]

_SHOWN = 5  # mistakes told at once; the others are counted

Node = yaml.Node
T = TypeVar("T")


class BadList(ValueError):
    """A list that cannot be used: where (line and path) and what, for each of its mistakes."""


class Mistake(Exception):
    """Something wrong at one place of a list."""

    def __init__(self, node: Node, path: str, what: str) -> None:
        super().__init__(f"line {node.start_mark.line + 1}: {path}: {what}")


def decoded(content: bytes) -> str:
    """The text of a file. Raises BadList."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadList(f"byte {error.start + 1} is not UTF-8") from None


def items(text: str, name: str, most: int) -> list[Node]:
    """What a text lists that is a mapping of one name to a list. Raises BadList."""
    try:
        top = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadList(f"{where}not YAML or JSON: {error.problem}") from None
    except RecursionError:
        raise BadList("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise BadList(f"not YAML or JSON: {' '.join(str(error).split())}") from None
    if top is None:
        raise BadList(f"it is empty; a list without {name} is written `{name}: []`")
    try:
        nodes = sequence(mapping(top, "", (name,))[name], name)
        if len(nodes) > most:
            raise Mistake(top, name, f"{len(nodes):,} are more than {most:,}")
    except Mistake as mistake:
        raise BadList(str(mistake)) from None
    return nodes


def each(nodes: Sequence[Node], read: Callable[[int, Node], T]) -> list[T]:
    """What is read of each item. Raises BadList with all mistakes, or the first few of many."""
    found: list[T] = []
    mistakes: list[str] = []
    for i, node in enumerate(nodes):
        try:
            found.append(read(i, node))
        except Mistake as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise BadList("; ".join(few(mistakes, _SHOWN)))
    return found


@contextmanager
def told(node: Node, path: str) -> Iterator[None]:
    """Give a ValueError of a block its place."""
    try:
        yield
    except ValueError as error:
        raise Mistake(node, path, str(error)) from None


def mapping(
    node: Node, path: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, Node]:
    """The values of a mapping by their keys; any keys where none are named. The path is empty at the top."""
    here = path or "the file"
    if not isinstance(node, yaml.MappingNode):
        example = f", as in `{required[0]}: []`" if not path else ""
        raise Mistake(node, here, f"must be a mapping{example}")
    known = required + optional
    values: dict[str, Node] = {}
    for key, value in node.value:
        name = text_of(key, f"a key of {here}")
        if known and name not in known:
            named = f"{path}.{name}" if path else name
            hint = near(name, known) or f"; known are {', '.join(known)}"
            raise Mistake(key, named, f"is not known{hint}")
        if name in values:
            raise Mistake(key, here, f"{name!r} is given twice")
        values[name] = value
    for name in required:
        if name not in values:
            raise Mistake(node, here, f"{name} is missing")
    return values


def sequence(node: Node, path: str) -> list[Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise Mistake(node, path, "must be a list; for none, write []")
    nodes: list[Node] = node.value
    return nodes


def text_of(node: Node, path: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise Mistake(node, path, "must be text")
    text: str = node.value
    return text


def near(given: str, known: Sequence[str]) -> str:
    """A hint at what may have been meant; empty where nothing is near."""
    found = difflib.get_close_matches(given[:100], known, n=1)
    return f"; did you mean {found[0]}?" if found else ""
