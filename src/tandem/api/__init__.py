"""The resource `InferenceEndpointConfig`: models of what code reads, defaults, validation by field path."""

from tandem.api.load import parse_endpoint, read_endpoint
from tandem.api.models import (
    ANNOTATION_CONNECTOR,
    GROUP,
    KIND,
    VERSIONS,
    Endpoint,
    KubernetesSpec,
    ModelSource,
    PdSpec,
    RequestLimits,
    Role,
    RoleSpec,
    Spec,
    Worker,
)
from tandem.api.problem import InvalidResource, Problem

__all__ = [
    "ANNOTATION_CONNECTOR",
    "GROUP",
    "KIND",
    "VERSIONS",
    "Endpoint",
    "InvalidResource",
    "KubernetesSpec",
    "ModelSource",
    "PdSpec",
    "Problem",
    "RequestLimits",
    "Role",
    "RoleSpec",
    "Spec",
    "Worker",
    "parse_endpoint",
    "read_endpoint",
]
