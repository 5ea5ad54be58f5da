"""A list of engines as text (see `listing`)."""

from __future__ import annotations

from collections.abc import Callable

from tandem.config import Subscription, engine_labels, engine_url
from tandem.http import Origin
from tandem.router.discovery.base import Member
from tandem.router.engines import EngineRole
from tandem.router.listing import BadList, Mistake, Node, each, items, mapping, near, text_of, told

__all__ = ["ENGINES_LIMIT", "BadList", "Subscriptions", "read_engines"]

ENGINES_LIMIT = 10_000
"""Engines that one list may have."""

Subscriptions = Callable[[str], Subscription | None]
"""Where an engine on a host publishes its KV events when nothing else is said of it."""


def read_engines(text: str, subscriptions: Subscriptions) -> frozenset[Member]:
    """The engines of a list. Raises BadList."""
    nodes = items(text, "engines", ENGINES_LIMIT)
    members: dict[str, int] = {}
    followed: dict[str, int] = {}

    def read(i: int, node: Node) -> Member:
        path = f"engines[{i}]"
        member = _member(node, path, subscriptions)
        first = members.setdefault(member.url, i)
        if first != i:
            raise Mistake(node, f"{path}.url", f"{member.url} is that of engines[{first}] already")
        for endpoint in sorted(member.kv_events.endpoints) if member.kv_events else ():
            if (other := followed.setdefault(endpoint, i)) != i:
                what = f"its KV events would be followed at {endpoint}, as those of engines[{other}] are"
                raise Mistake(node, f"{path}.kvEvents", f"{what}; give each engine its own endpoint")
        return member

    return frozenset(each(nodes, read))


def _member(node: Node, path: str, subscriptions: Subscriptions) -> Member:
    fields = mapping(node, path, ("url", "role"), ("labels", "kvEvents"))
    with told(fields["url"], f"{path}.url"):
        origin = Origin.parse(engine_url(text_of(fields["url"], f"{path}.url")))
    url, host = str(origin), origin.host
    role = _role(fields["role"], f"{path}.role")
    labels: tuple[tuple[str, str], ...] = ()
    if "labels" in fields:
        given = mapping(fields["labels"], f"{path}.labels")
        with told(fields["labels"], f"{path}.labels"):
            labels = engine_labels({name: text_of(n, f"{path}.labels.{name}") for name, n in given.items()})
    if "kvEvents" in fields:
        kv_events: Subscription | None = _subscription(fields["kvEvents"], f"{path}.kvEvents").at(host)
    else:
        kv_events = subscriptions(host)
    return Member(url, role, labels=labels, kv_events=kv_events)


def _role(node: Node, path: str) -> EngineRole:
    given = text_of(node, path)
    try:
        return EngineRole(given)
    except ValueError:
        roles = [role.value for role in EngineRole]
        what = f"{given[:100]!r} is not one of {', '.join(roles)}{near(given, roles)}"
        raise Mistake(node, path, what) from None


def _subscription(node: Node, path: str) -> Subscription:
    fields = mapping(node, path, ("endpoint",), ("replay", "ranks"))
    texts = {name: text_of(n, f"{path}.{name}") for name, n in fields.items()}
    ranks = texts.get("ranks", "1")
    if not (ranks.isascii() and ranks.isdigit() and len(ranks) < 10):
        raise Mistake(fields["ranks"], f"{path}.ranks", f"{ranks!r} is not a whole number")
    with told(node, path):
        return Subscription(texts["endpoint"], texts.get("replay"), int(ranks))
