"""Parsers of flag values. Each gives the value, or a ValueError that says what is wrong with a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.engines import engine_labels, listening_host


@dataclass(frozen=True)
class ReceiverPorts:
    """Where a decode engine's LMCache takes KV; `host` is None where it is the engine's own."""

    host: str | None
    init: tuple[int, ...]
    alloc: tuple[int, ...]


def receiver_ports(text: str) -> ReceiverPorts:
    """`[HOST:]INIT[,INIT…]:ALLOC[,ALLOC…]`, one port of each kind for each rank; else a ValueError."""
    host, colon, ports = text.rpartition(":")
    host, given, inits = host.rpartition(":") if colon else ("", "", "")
    try:
        init, alloc = (tuple(port(p) for p in part.split(",")) for part in (inits, ports))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not [HOST:]INIT[,INIT…]:ALLOC[,ALLOC…], as in 10.0.0.8:7300:7400: {error}"
        ) from None
    if len(init) != len(alloc):
        raise ValueError(f"{text!r} has {len(init)} init ports and {len(alloc)} alloc ports")
    if given and not host:
        raise ValueError(f"{text!r} has an empty host")
    return ReceiverPorts(host or None, init, alloc)


def port(text: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= 65535):
        raise ValueError(f"{text!r} is not a port")
    return int(text)


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """A parser that keeps the text as it is once `check` has accepted it."""

    def parse(text: str) -> str:
        check(text)
        return text

    return parse


def header_name(text: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9-]+", text):
        raise ValueError(f"{text!r} is not the name of a header, as in x-session-id")


def header_token(text: str) -> str:
    """The name of a header in lower case."""
    header_name(text)
    return text.lower()


def method(text: str) -> str:
    if text not in ("GET", "HEAD", "POST"):
        raise ValueError(f"{text!r} is none of GET, HEAD and POST, which are all that a router takes")
    return text


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


def origin(text: str) -> str:
    """An origin as browsers send it: in lower case, without the scheme's own port; or `*`."""
    lower = text.lower()
    scheme = lower.partition("://")[0]
    if lower != "*" and not _ORIGIN.fullmatch(lower):
        raise ValueError(f"{text!r} is no origin, as https://app.example or http://localhost:3000, and not *")
    own = {"http": ":80", "https": ":443"}.get(scheme)
    return lower.removesuffix(own) if own else lower


def field_name(text: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!r} is not the name of a field, as in user")


def request_path(text: str) -> None:
    if not re.fullmatch(r"/[A-Za-z0-9._~/-]*", text):
        raise ValueError(f"{text!r} is not a plain path, as /invocations: letters, digits, . _ ~ - and /")


def folder_path(text: str) -> None:
    if not re.fullmatch(r"/([A-Za-z0-9._~-]+/)*", text) or {".", ".."} & set(text.split("/")):
        raise ValueError(f"{text!r} is not a plain path that ends in /, as in /tandem/model/")


def label_name(text: str) -> None:
    engine_labels({text: ""})


_DNS_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.IGNORECASE)
_SERVICE = re.compile(r"_[a-z0-9-]+\._tcp(\.[a-z0-9_-]+)+\.?", re.IGNORECASE)


def dns_source(text: str) -> tuple[str, str, int | None]:
    """`ROLE=NAME:PORT` or `ROLE=_SERVICE._tcp.NAME` as (role, name, port); else a ValueError."""
    role, equals, name = text.partition("=")
    service = name.startswith("_")
    host, colon, number = (name, "", "") if service else name.rpartition(":")
    pattern = _SERVICE if service else _DNS_NAME
    named = pattern.fullmatch(host)
    if role not in ("prefill", "decode", "both") or not equals or not named or not (service or colon):
        raise ValueError(
            f"{text!r} is not ROLE=NAME:PORT or ROLE=_SERVICE._tcp.NAME, as in"
            f" prefill=prefill.models.svc:8081"
        )
    return role, host, None if service else port(number)


_KEY = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_REQUIREMENT = re.compile(
    rf"!?{_KEY}|{_KEY} *(=|==|!=) *{_VALUE}|{_KEY} +(not)?in *\( *{_VALUE} *(, *{_VALUE} *)*\)"
)
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def kubernetes_source(text: str) -> tuple[str, int, str]:
    """`NAMESPACE:PORT:SELECTOR` as (namespace, port, selector of labels); else a ValueError."""
    namespace, _, rest = text.partition(":")
    number, _, selector = rest.partition(":")
    if not _NAMESPACE.fullmatch(namespace) or not selector.strip():
        raise ValueError(f"{text!r} is not NAMESPACE:PORT:SELECTOR, as in models:8081:app=llama")
    # Commas stand between requirements, and in parentheses between values.
    for requirement in re.split(r",(?![^(]*\))", selector):
        if not _REQUIREMENT.fullmatch(requirement.strip(" ")):
            raise ValueError(
                f"{requirement!r} in the selector {selector!r} is none of NAME=VALUE, NAME!=VALUE, NAME, "
                "!NAME, NAME in (VALUE,VALUE) and NAME notin (VALUE,VALUE)"
            )
    return namespace, port(number), selector


def listen_address(text: str) -> None:
    host, _, number = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        listening_host(host[1:-1] if bracketed else host)
        port(number, least=0)
    except ValueError as error:
        raise ValueError(f"{text!r} is not HOST:PORT, as in 0.0.0.0:7500: {error}") from None
    if bracketed is not (":" in host):
        raise ValueError(f"{text!r} is not HOST:PORT, as in [::1]:7500: an IPv6 address needs brackets")


def some_text(text: str) -> None:
    if not text.strip():
        raise ValueError(f"{text!r} is empty; leave the flag out where there is nothing to say")


def between(low: float, high: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise ValueError(f"{text!r} is not {noun}") from None
        if not low <= value <= high:
            raise ValueError(f"{text} is outside {low:g} … {high:g}")
        return value

    return parse


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse


def json_object(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return text
