"""What a router has to know of a request's fields, worked out where the body is read.

Of a large body that is in another process (see `reading`): to decode it would hold up every stream.
"""

from __future__ import annotations

import msgspec

from tandem.router.body import Body
from tandem.router.classify import Api, refuse_fields, why_decode_only
from tandem.router.errors import ApiError
from tandem.router.plausible import Outline, outline


class Refusal(msgspec.Struct, frozen=True):
    """An ApiError 400."""

    message: str
    param: str | None = None

    def error(self) -> ApiError:
        return ApiError(400, self.message, param=self.param)


class ApiFacts(msgspec.Struct, frozen=True):
    """What a body means to one API."""

    decode_only: str | Refusal | None
    """See `classify.why_decode_only`."""
    outline: Outline | None
    """See `plausible.outline`."""


class Facts(msgspec.Struct, frozen=True):
    fields: list[tuple[str, int, int]]
    """Each field's name, and from where to where its value goes in the body."""
    apis: dict[str, ApiFacts]
    """By path."""
    ids: int | None = None
    """How many token ids its prompt is; None: it is something else."""


def facts(data: bytes) -> Facts:
    """Read a body. Raises ApiError 400 for one that may not be served."""
    body = Body.parse(data)
    refuse_fields(body)
    places = []
    at = 0
    for name in body.names():
        value = body.raw(name)
        found = data.find(value, at)  # also where the same is meant by other bytes: only what it says counts
        if found < 0:  # a name given twice keeps its first place and its last value
            found = data.find(value)
        places.append((name, found, found + len(value)))
        at = found + len(value)
    return Facts(places, {api.value: _of(api, body) for api in Api}, body.ids)


def _of(api: Api, body: Body) -> ApiFacts:
    why: str | Refusal | None
    try:
        why = why_decode_only(api, body)
    except ApiError as error:
        why = Refusal(error.message, error.param)
    return ApiFacts(why, outline(api, body))


def decode_only_of(api: Api, body: Body) -> str | None:
    """As `why_decode_only`, of a body that may have been read elsewhere."""
    if body.facts is None:
        return why_decode_only(api, body)
    known = body.facts.apis[api.value].decode_only
    if isinstance(known, Refusal):
        raise known.error()
    return known
