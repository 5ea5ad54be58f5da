"""A list of engines as text: YAML, of which JSON is a part. Every value is text, whether quoted or not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import yaml

from tandem.config import Subscription, engine_labels, engine_url
from tandem.http import Origin
from tandem.router.discovery.base import Member
from tandem.router.engines import EngineRole
from tandem.router.few import few

try:
    from yaml import CBaseLoader as _Loader
except ImportError:  # a PyYAML without libyaml: the same, ten times slower
    from yaml import BaseLoader as _Loader  # type: ignore[assignment]

ENGINES_LIMIT = 10_000
"""Engines that one list may have."""

_SHOWN = 5  # mistakes told at once; the others are counted

Subscriptions = Callable[[str], Subscription | None]
"""Where an engine on a host publishes its KV events when nothing else is said of it."""


class BadList(ValueError):
    """A list that cannot be used: where (line and path) and what, for each of its mistakes."""


class _Mistake(Exception):
    def __init__(self, node: yaml.Node, path: str, what: str) -> None:
        super().__init__(f"line {node.start_mark.line + 1}: {path}: {what}")


def read_engines(text: str, subscriptions: Subscriptions) -> frozenset[Member]:
    """The engines of a list. Raises BadList."""
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
        raise BadList("it is empty; a list without engines is written `engines: []`")
    try:
        nodes = _sequence(_mapping(top, "", ("engines",))["engines"], "engines")
        if len(nodes) > ENGINES_LIMIT:
            raise _Mistake(top, "engines", f"{len(nodes):,} are more than {ENGINES_LIMIT:,}")
    except _Mistake as mistake:
        raise BadList(str(mistake)) from None
    return _members(nodes, subscriptions)


def _members(nodes: list[yaml.Node], subscriptions: Subscriptions) -> frozenset[Member]:
    members: dict[str, tuple[int, Member]] = {}
    mistakes: list[str] = []
    followed: dict[str, int] = {}
    for i, node in enumerate(nodes):
        path = f"engines[{i}]"
        try:
            member = _member(node, path, subscriptions)
            first, _ = members.setdefault(member.url, (i, member))
            if first != i:
                raise _Mistake(node, f"{path}.url", f"{member.url} is that of engines[{first}] already")
            for endpoint in sorted(member.kv_events.endpoints) if member.kv_events else ():
                if (other := followed.setdefault(endpoint, i)) != i:
                    what = f"its KV events would be followed at {endpoint}, as those of engines[{other}] are"
                    raise _Mistake(node, f"{path}.kvEvents", f"{what}; give each engine its own endpoint")
        except _Mistake as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise BadList("; ".join(few(mistakes, _SHOWN)))
    return frozenset(member for _, member in members.values())


def _member(node: yaml.Node, path: str, subscriptions: Subscriptions) -> Member:
    fields = _mapping(node, path, ("url", "role"), ("labels", "kvEvents"))
    with _told(fields["url"], f"{path}.url"):
        origin = Origin.parse(engine_url(_text(fields["url"], f"{path}.url")))
    url, host = str(origin), origin.host
    role = _role(fields["role"], f"{path}.role")
    labels: tuple[tuple[str, str], ...] = ()
    if "labels" in fields:
        given = _mapping(fields["labels"], f"{path}.labels")
        with _told(fields["labels"], f"{path}.labels"):
            labels = engine_labels({name: _text(n, f"{path}.labels.{name}") for name, n in given.items()})
    if "kvEvents" in fields:
        kv_events: Subscription | None = _subscription(fields["kvEvents"], f"{path}.kvEvents").at(host)
    else:
        kv_events = subscriptions(host)
    return Member(url, role, labels=labels, kv_events=kv_events)


def _role(node: yaml.Node, path: str) -> EngineRole:
    given = _text(node, path)
    try:
        return EngineRole(given)
    except ValueError:
        roles = [role.value for role in EngineRole]
        what = f"{given[:100]!r} is not one of {', '.join(roles)}{_near(given, roles)}"
        raise _Mistake(node, path, what) from None


def _subscription(node: yaml.Node, path: str) -> Subscription:
    fields = _mapping(node, path, ("endpoint",), ("replay", "ranks"))
    texts = {name: _text(n, f"{path}.{name}") for name, n in fields.items()}
    ranks = texts.get("ranks", "1")
    if not (ranks.isascii() and ranks.isdigit() and len(ranks) < 10):
        raise _Mistake(fields["ranks"], f"{path}.ranks", f"{ranks!r} is not a whole number")
    with _told(node, path):
        return Subscription(texts["endpoint"], texts.get("replay"), int(ranks))


@contextmanager
def _told(node: yaml.Node, path: str) -> Iterator[None]:
    """Give a ValueError of a block its place."""
    try:
        yield
    except ValueError as error:
        raise _Mistake(node, path, str(error)) from None


def _mapping(
    node: yaml.Node, path: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, yaml.Node]:
    """The values of a mapping by their keys; any keys where none are named."""
    here = path or "the file"
    if not isinstance(node, yaml.MappingNode):
        raise _Mistake(node, here, f"must be a mapping{', as in `engines: []`' if not path else ''}")
    known = required + optional
    values: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = _text(key, f"a key of {here}")
        if known and name not in known:
            named = f"{path}.{name}" if path else name
            hint = _near(name, known) or f"; known are {', '.join(known)}"
            raise _Mistake(key, named, f"is not known{hint}")
        if name in values:
            raise _Mistake(key, here, f"{name!r} is given twice")
        values[name] = value
    for name in required:
        if name not in values:
            raise _Mistake(node, here, f"{name} is missing")
    return values


def _sequence(node: yaml.Node, path: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise _Mistake(node, path, "must be a list; for none, write []")
    nodes: list[yaml.Node] = node.value
    return nodes


def _text(node: yaml.Node, path: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Mistake(node, path, "must be text")
    text: str = node.value
    return text


def _near(given: str, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(given[:100], known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
