"""What the API server would refuse: mistakes against the schema, and against the rules in CEL beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from tandem.api.conventions import RESERVED_VOLUMES
from tandem.api.crd import schema_problems, spec_and_status
from tandem.api.crd.structural import Location
from tandem.api.models import GROUP, VERSIONS
from tandem.api.validation import unknown
from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, whole

Schema = dict[str, Any]


def schema_errors(subject: Subject, original: Mapping[str, Any]) -> Iterator[Found]:
    """Every mistake in a resource against the schema of its version; `original` still has its nulls.

    A version that is not served is judged as v1, so that the rest is told as well. Below status only names
    are judged: the API server drops what a client writes there.
    """
    yield from _api_version(subject)
    for at, message in schema_problems(dict(original), schema_of(subject.version)):
        rule = rule_of(message)
        if at[:1] != ("status",) or rule == "IEC101":
            yield Found(rule, at, _with_advice(at, rule, message, subject))


@cache
def schema_of(version: str) -> Schema:
    """A version's schema, not to be changed."""
    return spec_and_status(version)


def _api_version(subject: Subject) -> Iterator[Found]:
    given = subject.get("apiVersion")
    served = [f"{GROUP}/{version}" for version in VERSIONS]
    if given is None:
        yield Found("IEC102", ("apiVersion",), f"is required; use {served[0]}")
    elif isinstance(given, str) and given not in served:
        yield Found("IEC106", ("apiVersion",), f"is {given!r}; use {served[0]}")


_TYPES = (
    "a list",
    "true or false",
    "a whole number",
    "a whole number or a string",
    "a number",
    "an object",
    "a string",
)


def rule_of(message: str) -> str:
    """The rule behind what `schema_problems` says."""
    if message.startswith("is not a field"):
        return "IEC101"
    if message.startswith("is required"):
        return "IEC102"
    if message.startswith("is given twice"):
        return "IEC105"
    must = message.removeprefix("must be ")
    return "IEC103" if must.startswith(tuple(f"{kind} (" for kind in _TYPES)) else "IEC104"


_ADVICE = {
    "serverAddress": "only a workspace of Amazon Managed Prometheus can be named here. For a Prometheus "
    "of your own "
    "leave the trigger out and scale the Deployment with a ScaledObject of your own",
    "commitSHA": "give the whole commit, 40 hexadecimal digits, not a branch or a tag",
    "modelId": "write it as ORGANISATION/NAME",
    "instanceType": "HyperPod's instance types begin with ml., as ml.p5.48xlarge",
    "healthCheckPath": "begin it with a slash",
    "domainName": "one host name in lower case, without a wildcard",
    "l2CacheBackend": "use redis or tieredstorage",
    "maxConcurrentRequests": "for no limit leave it out",
    "modelName": "letters, digits and '-', at most 63, beginning with a letter or digit",
    "endpointName": "letters, digits and '-', at most 63, with a letter or digit at both ends",
    "path": "begin it with a slash; letters, digits, '-', '_', '.' and '/' may follow",
    "acmArn": "give a certificate's whole ARN, of the partition aws",
    "hostedZoneId": "give the id alone, as Z0123456789ABC",
    "tlsCertificateOutputS3Uri": "write it as s3://BUCKET/FOLDER",
    "s3Uri": "write it as s3://BUCKET/FOLDER",
    "serviceAccountName": "lower-case letters, digits, '-' and '.', as Kubernetes names it",
    "schedulerName": "lower-case letters, digits, '-' and '.', as Kubernetes names it",
}
"""What to do, by the field's name, where the schema's own words (a pattern, say) do not tell."""

_AMOUNT = "an amount is a number with a unit of Kubernetes or none, as 8, 500m or 200Gi"


def _with_advice(at: Location, rule: str, message: str, subject: Subject) -> str:
    if rule == "IEC101":
        return unknown.advice(at, message, subject, schema_of(subject.version))
    advice = _ADVICE.get(str(at[-1])) if at and rule == "IEC104" else None
    if rule == "IEC104" and at[-2:-1] in (("limits",), ("requests",)):
        advice = _AMOUNT
    if advice is None:
        return message
    return f"{advice}; it {message}" if message.startswith("must") else f"{message}; {advice}"


def rule_errors(subject: Subject) -> Iterator[Found]:
    """The rules in CEL that the resource breaks, each by its twin in Python."""
    yield from _broken(subject.resource, schema_of(subject.version), ())


def _broken(value: Any, schema: Schema, at: Location) -> Iterator[Found]:
    if at[:1] == ("status",):
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        twin, holds = TWINS[rule["rule"]]
        if not holds(value):
            where = tuple(rule["fieldPath"].removeprefix(".").split("."))
            yield Found(twin, (*at, *where), rule["message"])
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from _broken(value[name], inner, (*at, name))
    elif isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from _broken(item, schema["items"], (*at, i))


def _in(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _needs(kind: str, section: str) -> Callable[[Any], bool]:
    return lambda source: _in(source, "modelSourceType") != kind or _in(source, section) is not None


def _no_location(source: Any) -> bool:
    return _in(source, "modelSourceType") != "kubernetesVolume" or _in(source, "modelLocation") in (None, "")


def _has_volumes(spec: Any) -> bool:
    kind = _in(spec, "modelSourceConfig", "modelSourceType")
    return kind != "kubernetesVolume" or bool(_in(spec, "kubernetes", "volumes"))


def _one_way_to_name_types(spec: Any) -> bool:
    return _in(spec, "instanceType") is None or not _in(spec, "instanceTypes")


def _one_of_gateway_and_router(spec: Any) -> bool:
    both = (_in(spec, name, "enabled") is True for name in ("inferenceGateway", "intelligentRoutingSpec"))
    return not all(both)


def _bounds_in_order(scaling: Any) -> bool:
    low, high = bounds(scaling)
    return low is None or high is None or low <= high


def bounds(scaling: Any) -> tuple[int | None, int | None]:
    """The fewest and the most pods of an autoscaler, with its defaults; None for what is no number."""
    if not isinstance(scaling, dict):
        return None, None
    return whole(scaling.get("minReplicaCount", 1)), whole(scaling.get("maxReplicaCount", 5))


def _free_name(volume: Any) -> bool:
    return _in(volume, "name") not in RESERVED_VOLUMES


TWINS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "has(self.spec)": ("IEC102", lambda resource: _in(resource, "spec") is not None),
    "self.modelSourceType != 's3' || has(self.s3Storage)": ("IEC201", _needs("s3", "s3Storage")),
    "self.modelSourceType != 'fsx' || has(self.fsxStorage)": ("IEC202", _needs("fsx", "fsxStorage")),
    "self.modelSourceType != 'huggingface' || has(self.huggingFaceModel)": (
        "IEC203",
        _needs("huggingface", "huggingFaceModel"),
    ),
    "self.modelSourceType != 'kubernetesVolume' || !has(self.modelLocation) || self.modelLocation == ''": (
        "IEC204",
        _no_location,
    ),
    "self.modelSourceConfig.modelSourceType != 'kubernetesVolume'"
    " || (has(self.kubernetes) && has(self.kubernetes.volumes) && size(self.kubernetes.volumes) > 0)": (
        "IEC205",
        _has_volumes,
    ),
    f"!(self.name in [{', '.join(repr(name) for name in RESERVED_VOLUMES)}])": ("IEC206", _free_name),
    "!has(self.instanceType) || !has(self.instanceTypes) || size(self.instanceTypes) == 0": (
        "IEC207",
        _one_way_to_name_types,
    ),
    "!has(self.inferenceGateway) || !self.inferenceGateway.enabled"
    " || !has(self.intelligentRoutingSpec) || !self.intelligentRoutingSpec.enabled": (
        "IEC208",
        _one_of_gateway_and_router,
    ),
    "self.minReplicaCount <= self.maxReplicaCount": ("IEC209", _bounds_in_order),
}
"""By the text of each rule in CEL: the rule's id, and whether a value (of any shape) keeps it. A rule whose
text changes has no twin until somebody has looked at both; a value of another type keeps every rule, as the
schema has refused it already."""
