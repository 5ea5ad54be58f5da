"""`/invocations`, as SageMaker's containers have it and vLLM 0.32 serves it: which API a body is for."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.http import Request
from tandem.sim import protocol
from tandem.sim.refusal import MISTYPED, Refused

_NO_SESSIONS = "Invalid payload. stateful sessions not enabled"


class RequestType(Enum):
    NEW_SESSION = "NEW_SESSION"
    CLOSE = "CLOSE"


class SessionRequest(BaseModel):
    """What opens or closes a session; pydantic tells clients this name."""

    model_config = ConfigDict(extra="forbid")

    requestType: RequestType


def read(request: Request) -> tuple[bool, Any]:
    """Whether a request is a chat, else a completion; and its decoded body as that API gets it. Raises
    Refused."""
    body = _decode(request)
    _refuse_sessions(request, body)
    try:
        # Also where no header names one: the body's own is lost.
        body["model"] = _header(request, b"x-amzn-sagemaker-adapter-identifier")
    except TypeError as error:
        raise Refused(str(error)) from None
    for read_as in (protocol.read_chat, protocol.read_completion):
        try:
            _, _, wanted = read_as(body)
        except Refused as refused:
            if refused.kind != MISTYPED:
                raise
        else:
            return wanted.chat, body
    raise Refused(
        "Cannot find suitable handler for request. Expected one of: "
        "['ChatCompletionRequest', 'CompletionRequest']"
    )


def _decode(request: Request) -> Any:
    protocol.check_content_type(request.header(b"content-type"))
    try:
        return json.loads(request.body)
    except json.JSONDecodeError as error:
        raise Refused(f"JSON decode error: {error}", kind=MISTYPED) from None
    except UnicodeDecodeError as error:
        raise Refused(str(error)) from None


def _refuse_sessions(request: Request, body: Any) -> None:
    try:
        SessionRequest.model_validate(body)
    except ValidationError as error:
        try:
            meant = "requestType" in body
        except TypeError as no_object:
            raise Refused(str(no_object)) from None
        if meant:
            raise Refused(error.json(include_url=False), kind=MISTYPED) from None
    else:
        raise Refused(_NO_SESSIONS, kind=MISTYPED)
    if _header(request, b"x-amzn-sagemaker-session-id"):
        raise Refused(f"{_NO_SESSIONS}, X-Amzn-SageMaker-Session-Id header not supported", kind=MISTYPED)


def _header(request: Request, name: bytes) -> str | None:
    value = request.header(name)
    return None if value is None else value.decode("latin-1")
