"""Tandem's own annotations: what they ask for, and what is said of mistakes in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tandem.api import ANNOTATION_CONNECTOR, Role
from tandem.api.annotations import (
    PREFIX,
    RESERVED_VOLUMES,
    Extensions,
    RoleExtensions,
    known_annotations,
    parse_annotations,
)
from tandem.api.conversion import ANNOTATION_V1_FIELDS
from tandem.api.crd import spec_and_status


def asked(**annotations: str) -> Extensions:
    """What annotations ask for, written with _ in place of -."""
    extensions, problems = parse_annotations(
        {PREFIX + k.replace("_", "-"): v for k, v in annotations.items()}
    )
    assert problems == []
    return extensions


def mistakes(name: str, value: str) -> list[tuple[str, str]]:
    """What is said of one annotation: where within it, and what."""
    whole = f"metadata.annotations[{PREFIX}{name}]"
    extensions, problems = parse_annotations({PREFIX + name: value})
    assert extensions == Extensions(), "an annotation with a mistake is left out"
    assert all(p.where.startswith(whole) for p in problems)
    return [(p.where.removeprefix(whole), p.what) for p in problems]


def test_without_annotations_nothing_is_asked_for() -> None:
    expected = Extensions(
        "auto", True, False, {Role.PREFILL: RoleExtensions(), Role.DECODE: RoleExtensions()}
    )
    assert asked() == expected


def test_annotations_of_others_are_not_looked_at() -> None:
    others = {
        "team": "a",
        "tandem.development/x": "",
        "kubectl.kubernetes.io/last-applied-configuration": "{",
    }
    assert parse_annotations(others | {ANNOTATION_V1_FIELDS: "{}"}) == (Extensions(), [])


def test_an_endpoint_is_left_alone_or_paused() -> None:
    assert (asked(managed="false").managed, asked(managed="true").managed) == (False, True)
    assert (asked(paused="true").paused, asked(paused="false").paused) == (True, False)


def test_the_secret_of_api_keys_is_named() -> None:
    assert asked(api_keys_secret="keys.of-chat").api_keys_secret == "keys.of-chat"


@pytest.mark.parametrize("name", ["auto", "nixl", "lmcache"])
def test_the_connector_is_named(name: str) -> None:
    assert parse_annotations({ANNOTATION_CONNECTOR: name}) == (Extensions(connector=name), [])


@pytest.mark.parametrize("role", Role)
def test_each_role_has_its_own(role: Role) -> None:
    said: dict[str, Any] = {
        "env": [
            {"name": "UCX_TLS", "value": "rc"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["p"]}]}
                    ]
                }
            }
        },
        "volumes": [{"name": "cache", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}],
        "volume-mounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    for write in (json.dumps, yaml.safe_dump):
        annotations = {f"{PREFIX}{role}-{name}": write(value) for name, value in said.items()}
        extensions, problems = parse_annotations(annotations | {f"{PREFIX}{role}-image": "vllm:own"})
        assert problems == []
        assert extensions.roles[role] == RoleExtensions(
            image="vllm:own",
            env=tuple(said["env"]),
            tolerations=tuple(said["tolerations"]),
            affinity=said["affinity"],
            volumes=tuple(said["volumes"]),
            volume_mounts=tuple(said["volume-mounts"]),
        )
        (other,) = set(Role) - {role}
        assert extensions.roles[other] == RoleExtensions()


@pytest.mark.parametrize(
    ("name", "value", "where", "what"),
    [
        ("connector", "nixle", "", "must be one of auto, nixl, lmcache (it is 'nixle')"),
        ("paused", "yes", "", "must be true or false (it is 'yes')"),
        ("api-keys-secret", "", "", "must match ^[a-z0-9]"),
        ("api-keys-secret", "Keys_of", "", "must match ^[a-z0-9]"),
        ("managed", "", "", "must be true or false (it is '')"),
        ("prefill-image", "", "", "must not be empty"),
        ("prefill-env", "UCX_TLS=rc", "", "must be a list (it is 'UCX_TLS=rc')"),
        ("prefill-env", "", "", "must be a list (it is null)"),
        ("decode-env", "- {value: a}", "[0].name", "is required"),
        ("decode-env", "[{name: A, value: 1}]", "[0].value", "must be a string (it is 1)"),
        ("decode-env", "[{name: A, val: a}]", "[0].val", "is not a field; did you mean value?"),
        ("decode-env", "[{name: A}, {name: A}]", "[1]", "is given twice (A)"),
        (
            "decode-tolerations",
            "[{tolerationSeconds: 1.5}]",
            "[0].tolerationSeconds",
            "must be a whole number",
        ),
        ("decode-affinity", "{nodeAffinty: {}}", ".nodeAffinty", "did you mean nodeAffinity?"),
        ("prefill-volumes", "[{emptyDir: {}}]", "[0].name", "is required"),
        ("prefill-volumes", "[{name: shm, emptyDir: {}}]", "[0].name", "is 'shm', which Tandem uses itself"),
        ("prefill-volume-mounts", "[{name: a}]", "[0].mountPath", "is required"),
        ("prefill-env", "[", "", "is not YAML: "),
        ("prefill-env", "- a: 1\n  a: 2", "", "'a' is given twice (line 2, column 3 of the value)"),
        ("prefill-env", "[" * 5000, "", "is not YAML: it is nested too deeply"),
        ("prefill-env", "\x00", "", "is not YAML: "),
        (
            "prefill-envs",
            "[]",
            "",
            "is not an annotation that Tandem knows; did you mean tandem.dev/prefill-env?",
        ),
        ("zzz", "", "", "is not an annotation that Tandem knows"),
        ("router-env", "[]", "", "are for prefill and decode; routers have the operator's own settings"),
        ("worker-image", "a", "", "are for prefill and decode; what is for all engines is below spec.worker"),
        (
            "prefill-env",
            "[{name: A, value: y}]",
            "[0].value",
            "must be a string (it is true); put it in quotes",
        ),
        ("prefill-env", "&a [*a]", "", "is not YAML: an anchor's value contains itself"),
    ],
)
def test_a_mistake_is_told_by_annotation_and_path(name: str, value: str, where: str, what: str) -> None:
    ((found, said),) = mistakes(name, value)
    assert (found, what in said) == (where, True), said


def test_values_are_read_as_the_api_server_reads_a_manifest() -> None:
    """Null is left out, a whole number may be written as a fraction, and half a character is none."""
    value = '[{key: a, value: null, tolerationSeconds: 2.0}, {key: "\\ud800"}]'
    first, second = asked(decode_tolerations=value).roles[Role.DECODE].tolerations
    assert first == {"key": "a", "tolerationSeconds": 2}
    assert type(first["tolerationSeconds"]) is int
    assert second["key"].encode()


def test_an_annotation_cannot_fill_the_memory() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for i in range(1, 9):
        bomb += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n"
    assert mistakes("prefill-env", bomb) == [
        (
            "",
            "is not YAML: holds more than 20,000 values, with what aliases repeat "
            "(line 5, column 5 of the value)",
        )
    ]


def test_every_mistake_is_told_at_once_and_the_rest_holds() -> None:
    extensions, problems = parse_annotations(
        {"tandem.dev/prefill-env": "[{}, {name: 1}]", "tandem.dev/x": "", "tandem.dev/decode-image": "own"}
    )
    assert sorted(str(p) for p in problems) == [
        "metadata.annotations[tandem.dev/prefill-env][0].name: is required",
        "metadata.annotations[tandem.dev/prefill-env][1].name: must be a string (it is 1); put it in quotes",
        "metadata.annotations[tandem.dev/x]: is not an annotation that Tandem knows",
    ]
    assert extensions.roles[Role.DECODE].image == "own"


def test_the_volumes_that_are_taken_are_those_that_the_resource_refuses() -> None:
    volumes = spec_and_status()["properties"]["spec"]["properties"]["kubernetes"]["properties"]["volumes"]
    (rule,) = volumes["items"]["x-kubernetes-validations"]
    assert rule["rule"] == f"!(self.name in {[*RESERVED_VOLUMES]})"


def test_every_annotation_can_be_set_on_an_object() -> None:
    """The API server takes names of at most 63 letters, digits, `-`, `_` and `.`."""
    assert all(len(name) <= 63 and name.replace("-", "").isalnum() for name in known_annotations())
    assert PREFIX + "connector" == ANNOTATION_CONNECTOR
