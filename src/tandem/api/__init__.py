"""The resource `InferenceEndpointConfig`: models of what code reads, defaults, validation by field path."""

from tandem.api.load import InvalidResource, Problem, load_endpoint, parse_endpoint
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
    "load_endpoint",
    "parse_endpoint",
]
