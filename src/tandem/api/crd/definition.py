"""The CustomResourceDefinition as the API server takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.api.crd.schemas import spec_and_status
from tandem.api.models import GROUP, KIND, VERSIONS

PLURAL = "inferenceendpointconfigs"
SHORT_NAME = "iec"
NAME = f"{PLURAL}.{GROUP}"
"""The name of the definition itself."""

STORAGE_VERSION = "v1"

LABELS = {"app.kubernetes.io/name": "tandem"}
"""By these a definition of Tandem's is known from one of another owner."""

_COLUMNS = (
    ("State", "string", ".status.state", "The endpoint's state."),
    ("Prefill", "string", ".status.roles.prefill.summary", "Prefillers: ready/desired."),
    ("Decode", "string", ".status.roles.decode.summary", "Decoders: ready/desired."),
    ("Router", "string", ".status.roles.router.summary", "Router pods: ready/desired."),
    ("Age", "date", ".metadata.creationTimestamp", "How long the endpoint has existed."),
)


def crd(webhook: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The CustomResourceDefinition: v1, which is stored, and v1alpha1.

    `webhook` is the clientConfig (`url` or `service`, and `caBundle`) of a server that converts between the
    versions as `tandem.api.conversion` does. Without one the API server only changes apiVersion: what
    v1alpha1 does not have is then cut off when an object is read in it, and lost when that is written back.
    """
    # The operator writes its conversion in here. One that says "None" could not be applied over that.
    conversion: dict[str, Any] = {}
    if webhook is not None:
        given = {"clientConfig": dict(webhook), "conversionReviewVersions": ["v1"]}
        conversion = {"conversion": {"strategy": "Webhook", "webhook": given}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME, "labels": dict(LABELS)},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
            },
            **conversion,
            "versions": [_version(name) for name in VERSIONS],
        },
    }


def _version(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "served": True,
        "storage": name == STORAGE_VERSION,
        "schema": {"openAPIV3Schema": spec_and_status(name)},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": column, "type": kind, "jsonPath": path, "description": description}
            for column, kind, path, description in _COLUMNS
        ],
    }
