"""Texts and times as objects in the API have them."""

from __future__ import annotations

from datetime import UTC, datetime


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; one that was cut ends with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def literal(text: str) -> str:
    """A word of a command, or a variable's value, written so that Kubernetes hands on what is meant: it fills
    in `$(NAME)`, and of `$$` it leaves one."""
    return text.replace("$", "$$")


def utc_now() -> datetime:
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A moment to the second (RFC 3339), as in conditions and Events."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
