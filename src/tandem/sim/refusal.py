"""Error answers as vLLM 0.32 words them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MISTYPED = "Bad Request"
"""The kind of error of what is no request by the types of its fields."""

_MAX_TOLD = 10
_MAX_INPUT = 200


class Refused(Exception):
    """An error answer. `late`: found when the engine takes the request in, so that a stream has begun by then
    and the error is its first event."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
        *,
        late: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.late = late

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }


def internal_error(message: str = "Internal server error") -> Refused:
    return Refused(message, 500, "InternalServerError")


def parameter(message: str, param: str, *, late: bool = False, **value: object) -> Refused:
    """A parameter whose value cannot be; `value=` is told."""
    told = "".join(f", value={v}" for v in value.values())
    return Refused(f"{message} (parameter={param}{told})", param=param, late=late)


def invalid(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """Fields of the wrong type: entries with `type`, `loc`, `msg`, `input` and perhaps `ctx`, as pydantic
    tells them."""
    noun = "error" if len(errors) == 1 else "errors"
    lines = [
        f"  { ({**error, 'input': _summary(error['input'])} if 'input' in error else dict(error)) }"
        for error in errors[:_MAX_TOLD]
    ]
    if len(errors) > _MAX_TOLD:
        lines.append(f"  ...and {len(errors) - _MAX_TOLD} more {noun}")
    message = "\n".join([f"{len(errors)} validation {noun}:", *lines])
    return Refused(message, kind=MISTYPED, param=errors[0]["loc"])


def _summary(value: object) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MAX_INPUT else f"{text[:_MAX_INPUT]}...[truncated]"
