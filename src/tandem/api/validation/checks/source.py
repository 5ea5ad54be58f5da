"""Where the weights come from: modelSourceConfig, and the volume that holds the model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tandem.api.conventions import DEFAULT_MOUNT, LONGEST_PATH, RESERVED_VOLUMES
from tandem.api.validation.checks.pods import folder_errors
from tandem.api.validation.metadata import is_object_name
from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, location

_SOURCE = "spec.modelSourceConfig"
_SECTIONS = {"s3": "s3Storage", "fsx": "fsxStorage", "huggingface": "huggingFaceModel"}
_KINDS = (*_SECTIONS, "kubernetesVolume")
_MOUNT = "spec.worker.modelVolumeMount"

REGION = "the resource names none, so nothing can be made of it without the operator's own (render --region)"
"""Said of the AWS region where it is needed."""


_MOUNT_OPTIONS = (
    ("s3Storage.bucketName", r"[^\s-]\S*", "a bucket's name, without spaces"),
    ("s3Storage.region", r"[a-z0-9-]+", "a region's name, as us-east-2"),
    ("modelLocation", r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]+", "a folder's name on one line"),
)
"""What is handed to the driver that mounts a bucket, and what each may be."""


def bucket_region(subject: Subject) -> str:
    """The AWS region of the bucket with the weights; "" where they come from elsewhere."""
    in_bucket = subject.text(f"{_SOURCE}.modelSourceType") == "s3"
    return subject.text(f"{_SOURCE}.s3Storage.region") if in_bucket else ""


def source_checks(subject: Subject) -> Iterator[Found]:
    yield from _sections(subject)
    yield from _hugging_face(subject)
    yield from _model_volume(subject)


def _sections(subject: Subject) -> Iterator[Found]:
    kind = subject.text(f"{_SOURCE}.modelSourceType")
    for name in _SECTIONS.values():
        if kind in _KINDS and name != _SECTIONS.get(kind) and subject.has(f"{_SOURCE}.{name}"):
            yield Found(
                "IEC511",
                location(f"{_SOURCE}.{name}"),
                f"has no effect, as modelSourceType is {kind}; take it out",
            )
    if kind == "huggingface" and subject.text(f"{_SOURCE}.modelLocation"):
        yield Found(
            "IEC511",
            location(f"{_SOURCE}.modelLocation"),
            "has no effect with modelSourceType huggingface, whose model is named by "
            "huggingFaceModel.modelId; take it out",
        )
    if kind == "kubernetesVolume" and subject.flag(f"{_SOURCE}.prefetchEnabled", default=False):
        yield Found(
            "IEC511",
            location(f"{_SOURCE}.prefetchEnabled"),
            "has no effect with modelSourceType kubernetesVolume: the engine reads the volume itself",
        )
    for path in ("s3Storage.bucketName", "s3Storage.region", "fsxStorage.fileSystemId"):
        section = f"{_SOURCE}.{path}"
        if path.startswith(_SECTIONS.get(kind, "-")) and subject.get(section) == "":
            yield Found("IEC230", location(section), "must not be empty")
    system = f"{_SOURCE}.fsxStorage"
    if kind == "fsx" and subject.object(system) and not subject.text(f"{system}.dnsName"):
        yield Found("IEC724", location(system), f"has no dnsName, which is made of the AWS region; {REGION}")
    for path, allowed, what in _MOUNT_OPTIONS:
        value = subject.text(f"{_SOURCE}.{path}")
        if kind == "s3" and value and not re.fullmatch(allowed, value):
            yield Found("IEC233", location(f"{_SOURCE}.{path}"), f"must be {what} (it is {value!r})")
    bucket = subject.text(f"{_SOURCE}.s3Storage.bucketName")
    if kind == "s3" and (bucket.startswith("s3://") or ("/" in bucket and not bucket.startswith("arn:"))):
        yield Found(
            "IEC233",
            location(f"{_SOURCE}.s3Storage.bucketName"),
            f"must be the bucket's name alone, the folder goes into modelLocation (it is {bucket!r})",
        )


def _hugging_face(subject: Subject) -> Iterator[Found]:
    token = f"{_SOURCE}.huggingFaceModel.tokenSecretRef"
    if subject.text(f"{_SOURCE}.modelSourceType") != "huggingface" or not subject.object(token):
        return
    name = subject.text(f"{token}.name")
    if name and not is_object_name(name):
        said = f"must be a Secret's name: lower-case letters, digits, '-' and '.' (it is {name!r})"
        yield Found("IEC233", location(f"{token}.name"), said)
    if not name:
        yield Found("IEC230", location(f"{token}.name"), "is required: the name of the Secret with the token")
    if not subject.flag(f"{_SOURCE}.prefetchEnabled", default=False):
        yield Found(
            "IEC512",
            location(token),
            "has no effect without prefetchEnabled: only the container that downloads the model before "
            "the start gets "
            "the token. Set prefetchEnabled: true, or give HF_TOKEN in worker.environmentVariables",
        )


def _model_volume(subject: Subject) -> Iterator[Found]:
    name, volumes = subject.text(f"{_MOUNT}.name"), dict(_volumes(subject))
    kind = subject.text(f"{_SOURCE}.modelSourceType")
    if kind == "kubernetesVolume" and name and volumes and name not in volumes:
        yield Found(
            "IEC221",
            location(f"{_MOUNT}.name"),
            f"is {name!r}, but no volume of spec.kubernetes.volumes has that name (there "
            f"{'is' if len(volumes) == 1 else 'are'} {', '.join(volumes)}); with modelSourceType "
            f"kubernetesVolume one "
            "must hold the model",
        )
    if kind == "kubernetesVolume" and volumes.get(name) == {"name"}:
        i = list(volumes).index(name)
        yield Found(
            "IEC714",
            location("spec.kubernetes.volumes", i),
            "says no source, which makes it an empty folder: there is no model in it. Say hostPath or "
            "persistentVolumeClaim, say",
        )
    if kind in _SECTIONS and name in volumes:
        i = list(volumes).index(name)
        yield Found(
            "IEC236",
            location("spec.kubernetes.volumes", i, "name"),
            f"is {name!r}, the volume that is made for the weights from {kind}. Choose another name, or use "
            "modelSourceType kubernetesVolume",
        )
    if name in RESERVED_VOLUMES and kind != "kubernetesVolume":  # there no such volume can be given
        yield Found(
            "IEC234", location(f"{_MOUNT}.name"), f"is {name!r}, a name that is taken; choose another"
        )
    path = subject.text(f"{_MOUNT}.mountPath", DEFAULT_MOUNT)
    if not path.startswith("/") or re.search(r":|/\.\.(/|$)", path) or len(path) > LONGEST_PATH:
        yield Found(
            "IEC233",
            location(f"{_MOUNT}.mountPath"),
            f"must be an absolute path of at most {LONGEST_PATH:,} characters, without ':' and '..' (it is "
            f"{path!r})",
        )
    else:
        yield from folder_errors(path, location(f"{_MOUNT}.mountPath"))


def _volumes(subject: Subject) -> Iterator[tuple[str, set[str]]]:
    """Each volume's name, and the fields that it has."""
    for _, volume in subject.objects("spec.kubernetes.volumes"):
        yield str(volume.get("name")), set(volume)
