"""The Kubernetes types inside the resource, compared with the API server's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.api.crd import annotation_schemas, spec_and_status
from tandem.api.crd.schemas import fields

from .conftest import ApiServer
from .test_crd import LISTED, facts

KUBERNETES = 37
"""The minor version whose types the schema has."""


def core_types() -> list[tuple[str, dict[str, Any], str]]:
    """Each place with a core type: where, our schema, and the type's name."""
    schema = {path: field for path, field, _ in fields(spec_and_status())}
    places = []
    for path, said in map(facts, LISTED):
        if "core" in said:
            ours = schema[path]
            places.append((path, ours.get("items", ours), said["core"].rpartition(" ")[2]))
    role = annotation_schemas()["role"]
    kinds = {"env": "EnvVar", "tolerations": "Toleration", "affinity": "Affinity", "volumes": "Volume"}
    for name, kind in (kinds | {"volume-mounts": "VolumeMount"}).items():
        places.append((name, role[name].get("items", role[name]), kind))
    return places


@pytest.mark.parametrize(
    ("path", "ours", "kind"), core_types(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_kubernetes_types_are_those_of_the_api_server(
    bare_api_server: ApiServer, path: str, ours: dict[str, Any], kind: str
) -> None:
    minor = int(bare_api_server.raw("/version")["minor"].rstrip("+"))
    schemas = bare_api_server.raw("/openapi/v3/api/v1")["components"]["schemas"]
    theirs = dict(_shape("", {"$ref": f"#/components/schemas/io.k8s.api.core.v1.{kind}"}, schemas))
    found = dict(_shape("", ours, {}))
    if minor <= KUBERNETES:
        assert theirs.items() - found.items() == set()
    if minor >= KUBERNETES:
        assert found.items() - theirs.items() == set()


def _shape(path: str, schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A schema's fields: path → type, what is required, and what makes a list's items unique."""
    about = {**schema}
    while reference := about.get("$ref") or (about.get("allOf") or [{}])[0].get("$ref"):
        about = {key: value for key, value in about.items() if key.startswith("x-kubernetes-list")}
        about |= schemas[reference.rpartition("/")[2]]
    if path.endswith(".metadata"):
        return  # of a claim's template: labels and annotations are all that may be said there
    if "anyOf" in about or "oneOf" in about:
        yield path, "integer or string"
        return
    keys = sorted(about.get("x-kubernetes-list-map-keys", ()))
    yield (
        path,
        " ".join(
            [about["type"], about.get("format", ""), *keys, "required:", *sorted(about.get("required", ()))]
        ),
    )
    for name, field in about.get("properties", {}).items():
        yield from _shape(f"{path}.{name}", field, schemas)
    for key in ("items", "additionalProperties"):
        if key in about:
            yield from _shape(f"{path}[]", about[key], schemas)
