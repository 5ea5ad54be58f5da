"""Tandem's annotations: mistakes in them, and what they do to the pods of a role."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.api.annotations import PREFIX, known_annotations, parse_annotations
from tandem.api.conventions import DEFAULT_MOUNT
from tandem.api.crd.structural import Location
from tandem.api.models import Role
from tandem.api.validation.checks.placement import (
    combined_errors,
    node_affinity_errors,
    toleration_errors,
)
from tandem.api.validation.checks.pods import (
    added_volumes,
    folder_errors,
    image_errors,
    mount_errors,
    variable_errors,
    volume_errors,
    volume_names,
)
from tandem.api.validation.report import Found, shown_path
from tandem.api.validation.subject import Subject

_FOR_ALL = ("managed", "paused", "api-keys-secret")
"""Annotations that are not about disaggregation."""


def annotation_checks(subject: Subject) -> Iterator[Found]:
    given = {key: value for key, value in subject.annotations.items() if key.startswith(PREFIX)}
    for key, value in given.items():
        at = ("metadata", "annotations", key)
        for problem in parse_annotations({key: value})[1]:
            below = problem.where.removeprefix(shown_path(at)).removeprefix(".")
            where = (*at, *_parts(below))
            yield Found("IEC301", where, problem.what)
        name = key.removeprefix(PREFIX)
        if not subject.disaggregated and name in known_annotations() and name not in _FOR_ALL:
            yield Found("IEC516", at, "has no effect without pdSpec: it is about disaggregated endpoints")
    extensions, _ = parse_annotations(given)
    if extensions.api_keys_secret is not None and not subject.routed:
        yield Found(
            "IEC302",
            ("metadata", "annotations", f"{PREFIX}api-keys-secret"),
            "is for a router, and there is none: nobody would be asked for a key; set "
            "spec.intelligentRoutingSpec.enabled",
        )
    if not extensions.managed:
        yield Found(
            "IEC517",
            ("metadata", "annotations", f"{PREFIX}managed"),
            "is false: nothing is made of this resource",
        )
    for role in Role:
        wanted = extensions.roles[role]
        at = ("metadata", "annotations", f"{PREFIX}{role}-")
        yield from image_errors(wanted.image, (*at[:2], f"{at[2]}image"))
        volumes = list(wanted.volumes)
        shared = volume_names(subject)
        for i, volume in enumerate(volumes):
            if volume["name"] in shared:
                yield Found(
                    "IEC222",
                    (*at[:2], f"{at[2]}volumes", i, "name"),
                    f"is {volume['name']!r}, as a volume of the endpoint has it already; choose another name",
                )
        names = shared | added_volumes(subject) | {str(volume["name"]) for volume in volumes}
        yield from volume_errors(volumes, (*at[:2], f"{at[2]}volumes"))
        mounts = (*at[:2], f"{at[2]}volume-mounts")
        yield from mount_errors(list(wanted.volume_mounts), mounts, names)
        for i, mount in enumerate(wanted.volume_mounts):
            yield from _place_errors(subject, mount["mountPath"], (*mounts, i, "mountPath"))
        yield from variable_errors(list(wanted.env), (*at[:2], f"{at[2]}env"))
        yield from toleration_errors(list(wanted.tolerations), (*at[:2], f"{at[2]}tolerations"))
        nodes = (wanted.affinity or {}).get("nodeAffinity")
        place = (*at[:2], f"{at[2]}affinity", "nodeAffinity")
        yield from node_affinity_errors(nodes, place)
        if nodes:
            yield from combined_errors(subject, nodes, place)


def _place_errors(subject: Subject, folder: str, at: Location) -> Iterator[Found]:
    """Whether something can be mounted there beside the weights."""
    weights = subject.text("spec.worker.modelVolumeMount.mountPath", DEFAULT_MOUNT)
    if folder and folder.rstrip("/") == weights.rstrip("/"):
        yield Found("IEC233", at, f"must be apart from {weights}, where the weights are mounted")
    elif folder:
        yield from folder_errors(folder, at)


def _parts(path: str) -> Iterator[str | int]:
    """`[0].name` → 0, 'name'."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        if part:
            yield int(part) if part.isdecimal() else part
