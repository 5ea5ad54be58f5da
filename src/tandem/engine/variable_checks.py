"""The engines' variables: values that stop an engine, and names that Tandem sets itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tandem.api import Role
from tandem.api.annotations import PREFIX, parse_annotations
from tandem.api.crd.structural import Location
from tandem.api.validation import Found, Subject
from tandem.api.validation.subject import objects_in
from tandem.engine import pod_variables
from tandem.engine.lmcache_modes import wrong_variable
from tandem.engine.pd_buffer import VARIABLE as PD_BUFFER

OF_ALL = "spec.worker.environmentVariables"

HASH_SEED = "PYTHONHASHSEED"
_HASH_SEED = re.compile(r"\s*\+?0*([0-9]{1,10})")

_RANDOM = ("", "random")

_INSTEAD = {
    pod_variables.LMCACHE_FILE: "name the file in spec.kvCacheSpec.cacheConfigFile",
    pod_variables.lmcache_variable("pd_buffer_size"): f"say {PD_BUFFER}",
}
"""What has the effect that a variable was meant to have."""


def variables(subject: Subject, role: Role | None) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Those of all engines (None), or those that an annotation adds to a role's."""
    if role is None:
        return subject.objects(OF_ALL)
    own = parse_annotations(subject.annotations)[0].roles[role].env if subject.disaggregated else ()
    return objects_in(list(own), ("metadata", "annotations", f"{PREFIX}{role}-env"))


def role_variable(subject: Subject, role: Role, name: str) -> tuple[Location, dict[str, Any]] | None:
    """A variable as a role's engines have it, and where it stands: the role's own replaces that of all."""
    given = (*variables(subject, role), *variables(subject, None))
    return next((found for found in given if found[1].get("name") == name), None)


def value_checks(subject: Subject) -> Iterator[Found]:
    for role in (None, *Role):
        for at, variable in variables(subject, role):
            value = variable.get("value")
            judged = isinstance(value, str) and "$(" not in value  # what a reference comes to is not known
            if variable.get("name") == HASH_SEED and judged and not is_hash_seed(value):
                said = f"must be a number up to 4294967295: Python does not start (it is {value!r})"
                yield Found("IEC232", (*at, "value"), said)


def is_hash_seed(value: Any) -> bool:
    """Whether Python starts with it as PYTHONHASHSEED."""
    match = _HASH_SEED.fullmatch(value) if isinstance(value, str) else None
    return value in _RANDOM or (match is not None and int(match[1]) < 2**32)


def hash_seed(value: str) -> int | None:
    """PYTHONHASHSEED as Python reads it; None: another one in each process."""
    return None if value in _RANDOM else int(value)


def owned_checks(subject: Subject, connector: str, *, cached: bool) -> Iterator[Found]:
    """Variables that are replaced, or refused. `cached`: whether a colocated endpoint's engines keep KV in
    LMCache."""
    owned = pod_variables.owned_variables(connector, disaggregated=subject.disaggregated, cached=cached)
    for role in (None, *Role):
        for at, variable in variables(subject, role):
            match variable:
                case {"name": pod_variables.POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
                    pass  # as Tandem sets it
                case {"name": str(name), "value": value} if name in owned and (
                    why := wrong_variable(name, value)
                ):
                    yield Found("IEC409", (*at, "value"), why)
                case {"name": str(name)} if name in owned:
                    instead = f"; {_INSTEAD[name]} instead" if name in _INSTEAD else ""
                    yield Found("IEC521", at, f"{name} is replaced: Tandem sets it for each pod{instead}")
