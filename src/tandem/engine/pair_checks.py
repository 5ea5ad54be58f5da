"""Whether prefillers and decoders work together: what must be the same in both, and what hands over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.api import Endpoint, Role
from tandem.api.annotations import PREFIX, parse_annotations
from tandem.api.crd.structural import Location
from tandem.api.validation import Found, Subject
from tandem.api.validation.schema import bounds
from tandem.api.validation.subject import location, objects_in
from tandem.engine import roles
from tandem.engine.args import flag_value
from tandem.engine.errors import EngineError
from tandem.engine.flag_checks import Flags
from tandem.engine.kv_size import kv_bytes_per_token
from tandem.engine.kv_transfer import choose_connector

SMALLEST_KV_BYTES = 1024
"""KV bytes of a token on one rank that every model is above; small ones have some 4 KiB."""

CHUNK_TOKENS = 256
"""LMCache charges its buffer in whole chunks of so many tokens."""

BUFFER = "PD_BUFFER_SIZE"
_PD = "spec.pdSpec"
_VARIABLES = "spec.worker.environmentVariables"
_SCALING = "spec.intelligentRoutingSpec.autoScalingSpec"


def pair_checks(
    subject: Subject,
    endpoint: Endpoint,
    of_role: Mapping[Role, Flags],
    model_config: Mapping[str, Any] | None,
) -> Iterator[Found]:
    """What is found about the two roles of a disaggregated endpoint."""
    yield from _pair(endpoint, of_role)
    yield from _threshold(subject, endpoint)
    yield from _connector(subject, endpoint, of_role, model_config)


def _pair(endpoint: Endpoint, of_role: Mapping[Role, Flags]) -> Iterator[Found]:
    """Whether what the prefillers compute can be read by the decoders."""
    prefill, decode = of_role[Role.PREFILL], of_role[Role.DECODE]
    for flag in ("--dtype", "--kv-cache-dtype"):
        values = [flag_value(flags.args, flag) or "auto" for flags in (prefill, decode)]
        if values[0] != values[1]:
            at = _place(flag, decode, prefill)
            said = f"{flag} is {values[0]} for prefillers and {values[1]} for decoders"
            yield Found(
                "IEC406", at, f"{said}: decoders cannot read KV of another kind. Set it in worker.args"
            )
    models = [roles.model_argument(flags.args) or "of the image" for flags in (prefill, decode)]
    if models[0] != models[1]:
        said = f"prefillers have the model {models[0]} and decoders {models[1]}; set it in worker.args"
        yield Found("IEC406", _place("--model", decode, prefill), said)
    else:
        try:
            roles.served_model_name(endpoint)
        except EngineError as error:
            at = _place("--served-model-name", decode, prefill)
            yield Found("IEC406", at, str(error).removeprefix(f"{_PD}: "))
    for flag, what in (
        ("--max-model-len", "longer prompts fail in one of the roles"),
        ("--block-size", "KV blocks are cut anew for each hand-off"),
    ):
        sizes = [flags.number(flag) for flags in (prefill, decode)]
        if None not in sizes and sizes[0] != sizes[1]:
            said = f"{flag} is {sizes[0]} for prefillers and {sizes[1]} for decoders"
            yield Found("IEC721", _place(flag, decode, prefill), f"{said}: {what}")


def _place(flag: str, *of: Flags) -> Location:
    """Where a flag stands that the roles differ in: a role's own place rather than one that both share."""
    places = [found[1] for flags in of if (found := flags.last(flag))]
    return next((at for at in places if at[1] == "pdSpec"), places[0] if places else location(_PD))


def _threshold(subject: Subject, endpoint: Endpoint) -> Iterator[Found]:
    threshold = subject.number(f"{_PD}.routingThreshold")
    at = location(_PD if threshold is None else f"{_PD}.routingThreshold")
    threshold = 4096 if threshold is None else threshold
    try:
        length = roles.max_model_len(endpoint)
    except (EngineError, OverflowError):
        return
    if length is not None and threshold >= length:
        said = "routingThreshold is 4096, its default" if at == location(_PD) else f"is {threshold}"
        yield Found(
            "IEC706",
            at,
            f"{said}, and --max-model-len {length}: no prompt is so long, so nothing is disaggregated",
        )


def _connector(
    subject: Subject,
    endpoint: Endpoint,
    of_role: Mapping[Role, Flags],
    model_config: Mapping[str, Any] | None,
) -> Iterator[Found]:
    try:
        connector = choose_connector(endpoint)
    except EngineError:
        return  # the annotation's mistake is told
    sizes = list(_buffer_sizes(subject))
    if connector.name != "lmcache":
        for at, _ in sizes:
            yield Found(
                "IEC518",
                at,
                f"{BUFFER} has no effect, as the connector is {connector.reason}; it is LMCache's",
            )
        return
    for at, value in sizes:
        if value is None:
            yield Found("IEC232", at, f"{BUFFER} must have a value of its own: sizes are computed with it")
        elif not re.fullmatch(r"[1-9][0-9]{0,17}", value):
            yield Found("IEC232", at, f"must be a number of bytes in digits, as 8589934592 (it is {value!r})")
        else:
            yield from _buffer(at, int(value), of_role[Role.DECODE], model_config)
    most = bounds(subject.get(_SCALING))[1]
    if most is not None and most > 1:
        yield Found(
            "IEC719",
            location(_SCALING),
            f"asks for up to {most} routers; with LMCache there is one, as prefillers report to one address",
        )
    for at, variable in subject.objects(_VARIABLES):
        if variable.get("name") == "PYTHONHASHSEED" and variable.get("value") == "random":
            yield Found("IEC406", (*at, "value"), 'is "random": LMCache finds no KV of another pod. Use "0"')
    for flags in of_role.values():
        last = flags.last("--data-parallel-size")
        if last and flags.size("--data-parallel-size") > 1:
            said = f"is {last[0]}, but LMCache hands over between engines of one data-parallel rank"
            yield Found("IEC406", last[1], f"{said}; use the connector nixl, or more replicas")
    ranks = [of_role[role].size("--tensor-parallel-size") for role in Role]
    if ranks[0] != ranks[1]:
        said = f"--tensor-parallel-size is {ranks[0]} for prefillers and {ranks[1]} for decoders"
        at = _place("--tensor-parallel-size", of_role[Role.DECODE], of_role[Role.PREFILL])
        yield Found("IEC406", at, f"{said}; LMCache hands over from rank to rank, so both must be the same")


def _buffer_sizes(subject: Subject) -> Iterator[tuple[Location, str | None]]:
    """Each size of the decoders' buffer, and where it stands; None where it comes from elsewhere."""
    key = f"{PREFIX}{Role.DECODE}-env"
    own = list(parse_annotations(subject.annotations)[0].roles[Role.DECODE].env)
    for at, variable in (
        *subject.objects(_VARIABLES),
        *objects_in(own, ("metadata", "annotations", key)),
    ):
        value = variable.get("value")
        if variable.get("name") == BUFFER and "valueFrom" in variable:
            yield at, None
        elif variable.get("name") == BUFFER and isinstance(value, str):
            yield at, value


def _buffer(at: Location, size: int, flags: Flags, model_config: Mapping[str, Any] | None) -> Iterator[Found]:
    ranks, kind = flags.size("--tensor-parallel-size"), flag_value(flags.args, "--kv-cache-dtype") or ""
    known = kv_bytes_per_token(model_config or {}, ranks, element_bytes=1 if kind.startswith("fp8") else 2)
    longest = flags.number("--max-model-len") or CHUNK_TOKENS
    tokens = -(-longest // CHUNK_TOKENS) * CHUNK_TOKENS
    needed = tokens * (known or SMALLEST_KV_BYTES)
    if size < needed:
        takes = (
            f"takes {needed} bytes on each rank" if known else f"takes at least {needed} bytes of any model"
        )
        yield Found(
            "IEC707",
            at,
            f"{BUFFER} is {size} bytes, but a prompt of {longest} tokens {takes}; decoders compute such "
            f"prompts alone",
        )
