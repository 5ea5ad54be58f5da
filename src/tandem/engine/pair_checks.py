"""Whether prefillers and decoders work together: what must be the same in both, and what hands over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tandem.api import Endpoint, Role
from tandem.api.crd.structural import Location
from tandem.api.validation import Found, Subject
from tandem.api.validation.schema import bounds
from tandem.api.validation.subject import location
from tandem.engine import roles
from tandem.engine.args import flag_value, switch
from tandem.engine.errors import EngineError
from tandem.engine.flag_checks import Flags
from tandem.engine.kv_size import model_names, token_size
from tandem.engine.kv_transfer import choose_connector
from tandem.engine.lmcache_modes import wrong_transfer
from tandem.engine.pd_buffer import VARIABLE, given_bytes, pd_buffer
from tandem.engine.pod_ports import MOST_LMCACHE_RANKS
from tandem.engine.pod_variables import DEFAULT_HASH_SEED
from tandem.engine.variable_checks import (
    HASH_SEED,
    hash_seed,
    is_hash_seed,
    role_variable,
    variables,
)

_PD = "spec.pdSpec"
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
    except EngineError:
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
    if connector.name != "lmcache":
        for at in _mentions(subject, (None, *Role)):
            yield _no_buffer(at, f"as the connector is {connector.reason}; it is LMCache's")
        return
    for at in _mentions(subject, (Role.PREFILL,)):
        yield _no_buffer(at, "as it is decoders that have such a buffer")
    yield from _buffer(subject, endpoint, of_role, model_config)
    yield from _one_router(subject)
    yield from _hash_seeds(subject)
    yield from _prefix_cache(of_role[Role.DECODE])
    yield from _ranks(of_role)
    yield from _modes(of_role)


def _one_router(subject: Subject) -> Iterator[Found]:
    most = bounds(subject.get(_SCALING))[1]
    if most is not None and most > 1:
        yield Found(
            "IEC719",
            location(_SCALING),
            f"asks for up to {most} routers; with LMCache there is one, as prefillers report to one address",
        )


def _prefix_cache(decode: Flags) -> Iterator[Found]:
    last = decode.last("--enable-prefix-caching")
    if last and switch(decode.args, "--enable-prefix-caching"):
        said = f"{last[0]} is replaced for decoders: LMCache never frees what their own prefix cache has"
        yield Found("IEC519", last[1], said)


def _ranks(of_role: Mapping[Role, Flags]) -> Iterator[Found]:
    """LMCache hands over from a tensor-parallel rank to its counterpart."""
    for flags in of_role.values():
        last = flags.last("--data-parallel-size")
        if last and flags.size("--data-parallel-size") > 1:
            said = f"is {last[0]}, but LMCache hands over between engines of one data-parallel rank"
            yield Found("IEC406", last[1], f"{said}; use the connector nixl, or more replicas")
        last = flags.last("--tensor-parallel-size")
        if last and flags.size("--tensor-parallel-size") > MOST_LMCACHE_RANKS:
            said = f"is {last[0]}; LMCache hands over between at most {MOST_LMCACHE_RANKS} ranks of an engine"
            yield Found("IEC406", last[1], said)
    ranks = [of_role[role].size("--tensor-parallel-size") for role in Role]
    if ranks[0] != ranks[1]:
        said = f"--tensor-parallel-size is {ranks[0]} for prefillers and {ranks[1]} for decoders"
        at = _place("--tensor-parallel-size", of_role[Role.DECODE], of_role[Role.PREFILL])
        yield Found("IEC406", at, f"{said}; LMCache hands over from rank to rank, so both must be the same")


def _modes(of_role: Mapping[Role, Flags]) -> Iterator[Found]:
    """Modes that `--kv-transfer-config` asks for; `owned_checks` tells of variables that do."""
    for flags in of_role.values():
        if last := flags.last("--kv-transfer-config"):
            for why in wrong_transfer(flags.args):
                yield Found("IEC409", last[1], why)


def _hash_seeds(subject: Subject) -> Iterator[Found]:
    """LMCache's keys are Python's hashes: engines that seed them differently find no KV of one another."""
    seeds: dict[Role, int] = {}
    places: list[Location] = []
    for role in Role:
        at, variable = role_variable(subject, role, HASH_SEED) or (None, {"value": DEFAULT_HASH_SEED})
        value = variable.get("value", "")
        if "valueFrom" in variable or not is_hash_seed(value):
            return  # not known here, or told already
        if at is not None:
            places.append((*at, "value"))
        seed = hash_seed(value)
        if seed is not None:
            seeds[role] = seed
        else:
            yield Found("IEC406", places[-1], f'is {value!r}: LMCache finds no KV of another pod. Use "0"')
    if len(set(seeds.values())) > 1:
        told = " and ".join(f"{seed} for the {role} engines" for role, seed in seeds.items())
        own = next((at for at in places if at[0] == "metadata"), places[0])
        yield Found("IEC406", own, f"{HASH_SEED} is {told}: LMCache finds no KV of the other role")


def _no_buffer(at: Location, why: str) -> Found:
    return Found("IEC518", at, f"{VARIABLE} has no effect, {why}")


def _mentions(subject: Subject, roles: Iterable[Role | None]) -> Iterator[Location]:
    """Where the variable is given: for the roles named, or (None) for both."""
    for role in roles:
        yield from (at for at, variable in variables(subject, role) if variable.get("name") == VARIABLE)


def _buffer(
    subject: Subject,
    endpoint: Endpoint,
    of_role: Mapping[Role, Flags],
    model_config: Mapping[str, Any] | None,
) -> Iterator[Found]:
    """Whether the decoders' buffer is a size and holds what is sent: the same sum as where it is rendered."""
    given = None
    flags = of_role[Role.DECODE]
    last = flags.last("--max-model-len")
    at = last[1] if last else location(_PD)
    if found := role_variable(subject, Role.DECODE, VARIABLE):
        where, variable = found
        if "valueFrom" in variable:
            yield Found(
                "IEC232", where, f"{VARIABLE} must have a value of its own: sizes are computed with it"
            )
            return
        if isinstance(variable.get("value"), str):
            at = where
            try:
                given = given_bytes(variable["value"])
            except ValueError as error:
                yield Found("IEC232", at, f"{VARIABLE} {error}")
                return
    token = token_size(
        model_config,
        model_names(endpoint),
        tp=flags.size("--tensor-parallel-size"),
        kv_cache_dtype=flag_value(flags.args, "--kv-cache-dtype"),
    )
    lengths = [length for role in Role if (length := of_role[role].number("--max-model-len"))]
    longest = min(lengths, default=None)
    try:
        buffer = pd_buffer(token, longest=longest, given=given)
    except ValueError as error:
        yield Found("IEC237", at, f"{VARIABLE}: {error}")
        return
    if complaint := buffer.complaint(longest):
        yield Found("IEC707", at, f"{VARIABLE}: {complaint}. {buffer.reason}")
