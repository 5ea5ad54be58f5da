"""What Kubernetes refuses in a pod, found before there is one: in volumes, init containers, variables, probes
and ports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tandem.api import conventions
from tandem.api.crd.structural import Location
from tandem.api.models import Role
from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, location, objects_in, whole

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VARIABLES = "spec.worker.environmentVariables"


def pod_checks(subject: Subject) -> Iterator[Found]:
    yield from volume_errors(subject.get("spec.kubernetes.volumes"), location("spec.kubernetes.volumes"))
    yield from _init_containers(subject)
    yield from variable_errors(subject.get(_VARIABLES), location(_VARIABLES))
    yield from _probes(subject)
    yield from _ports(subject)
    yield from _names(subject)
    yield from _counts(subject)
    yield from image_errors(subject.get("spec.worker.image"), location("spec.worker.image"))


def image_errors(image: Any, at: Location) -> Iterator[Found]:
    """Whether a text cannot be an image's name, which lies at `at`."""
    if isinstance(image, str) and (not image.strip() or re.search(r"\s|://", image)):
        yield Found("IEC233", at, f"must be an image's name, without spaces and https:// (it is {image!r})")


def _counts(subject: Subject) -> Iterator[Found]:
    """Numbers that the schema does not bound."""
    seconds = subject.number("spec.maxDeployTimeInSeconds")
    if seconds is not None and seconds <= 15:  # a pod counts as available when it was ready so long
        at = location("spec.maxDeployTimeInSeconds")
        yield Found("IEC710", at, f"is {seconds}: every deployment would count as failed at once")


def volume_errors(volumes: Any, at: Location) -> Iterator[Found]:
    """Mistakes in a list of volumes that lies at `at`."""
    listed = list(objects_in(volumes, at))
    yield from _names_of(listed, "volume")
    for where, volume in listed:
        sources = sorted(set(volume) - {"name"})
        if len(sources) > 1:
            yield Found("IEC224", where, f"has several sources, {' and '.join(sources)}; a volume has one")
        if _of(volume, "persistentVolumeClaim", "claimName") == "":
            said = "must not be empty: the name of a claim in the endpoint's namespace"
            yield Found("IEC230", (*where, "persistentVolumeClaim", "claimName"), said)
        path, kind = (_of(volume, "hostPath", field) for field in ("path", "type"))
        if path == "":
            yield Found("IEC230", (*where, "hostPath", "path"), "must not be empty: a folder of the node")
        if path and ".." in path.split("/"):
            yield Found(
                "IEC233", (*where, "hostPath", "path"), f"must be a path without '..' (it is {path!r})"
            )
        if kind and kind not in _HOST_PATH_TYPES:
            said = f"must be one of {', '.join(_HOST_PATH_TYPES)} (it is {kind!r})"
            yield Found("IEC233", (*where, "hostPath", "type"), said)


_HOST_PATH_TYPES = (
    "BlockDevice",
    "CharDevice",
    "Directory",
    "DirectoryOrCreate",
    "File",
    "FileOrCreate",
    "Socket",
)


def _of(volume: dict[str, Any], source: str, field: str) -> str | None:
    """A text of one of a volume's sources."""
    given = volume.get(source)
    text = given.get(field) if isinstance(given, dict) else None
    return text if isinstance(text, str) else None


def _names_of(listed: list[tuple[Location, dict[str, Any]]], what: str) -> Iterator[Found]:
    """Names that are no DNS labels, and those that are given twice."""
    seen: dict[str, Location] = {}
    for where, item in listed:
        name = item.get("name")
        if not isinstance(name, str):
            continue
        if not (_LABEL.fullmatch(name) and len(name) <= 63):
            yield Found(
                "IEC225",
                (*where, "name"),
                f"must be lower-case letters, digits and '-', at most 63, as it names a {what} (it is "
                f"{name!r})",
            )
        if name in seen:
            yield Found(
                "IEC222", (*where, "name"), f"is {name!r}, as the {what} before has it; choose another name"
            )
        seen[name] = where


def mount_errors(mounts: Any, at: Location, volumes: Iterable[str]) -> Iterator[Found]:
    """Mounts of volumes that the pod does not have, and those without a place."""
    known = sorted(volumes)
    for where, mount in objects_in(mounts, at):
        name = mount.get("name")
        if mount.get("mountPath") == "":
            yield Found("IEC230", (*where, "mountPath"), "must not be empty: where the volume is mounted")
        if isinstance(name, str) and name not in known:
            yield Found(
                "IEC223",
                (*where, "name"),
                f"is {name!r}, but there is no such volume; there are {', '.join(known)}",
            )


def folder_errors(folder: str, at: Location) -> Iterator[Found]:
    """Whether something can be mounted there in the model container."""
    if ours := conventions.clash(folder):
        yield Found(
            "IEC233",
            at,
            f"must be apart from {ours}, where Tandem has a volume of its own (it is {folder!r})",
        )


def volume_names(subject: Subject) -> set[str]:
    """The volumes that every model pod has, less those that Tandem adds."""
    named = {str(v["name"]) for _, v in subject.objects("spec.kubernetes.volumes") if "name" in v}
    return named | {subject.text("spec.worker.modelVolumeMount.name")} - {""}


def added_volumes(subject: Subject) -> set[str]:
    """The volumes that Tandem adds to every model pod. Whether LMCache's is there, its connector tells."""
    unused = {"gated-model-downloader-configmap"}
    if not (_fetches(subject) and _source(subject) in ("s3", "fsx")):
        unused |= {"model-weights-copy", "parallel-copy-configmap"}
    return {*conventions.RESERVED_VOLUMES} - unused


def _source(subject: Subject) -> str:
    return subject.text("spec.modelSourceConfig.modelSourceType")


def _fetches(subject: Subject) -> bool:
    """Whether a container fetches the weights before the engine starts."""
    asked = subject.flag("spec.modelSourceConfig.prefetchEnabled", default=False)
    return asked and _source(subject) != "kubernetesVolume"


def _container_names(subject: Subject) -> set[str]:
    """Of the containers that Tandem puts into model pods."""
    endpoint = subject.text("metadata.name")
    engines = {f"{role}-{endpoint}" for role in Role} if subject.disaggregated else {endpoint}
    return engines | _beside_engine(subject)


def _beside_engine(subject: Subject) -> set[str]:
    """Of the containers that Tandem puts into model pods beside the engine's."""
    named = {conventions.PROXY_CONTAINER}
    if subject.flag("spec.metrics.enabled", default=True):
        named.add(conventions.COLLECTOR_CONTAINER)
    if _fetches(subject):
        downloads = _source(subject) == "huggingface"
        named.add(conventions.DOWNLOAD_CONTAINER if downloads else conventions.COPY_CONTAINER)
    return named


_OF_CONTAINERS = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
}


def _init_containers(subject: Subject) -> Iterator[Found]:
    listed = list(subject.objects("spec.kubernetes.initContainers"))
    yield from _names_of(listed, "container")
    volumes, taken = volume_names(subject) | added_volumes(subject), _container_names(subject)
    for where, container in listed:
        name = container.get("name")
        if isinstance(name, str) and name in taken:
            said = f"is {name!r}, as a container of Tandem's in the same pod; choose another name"
            yield Found("IEC222", (*where, "name"), said)
        if not container.get("image"):
            yield Found("IEC230", (*where, "image"), "is required: the init container's image")
        else:
            yield from image_errors(container["image"], (*where, "image"))
        for field, allowed in _OF_CONTAINERS.items():
            if (value := container.get(field)) and value not in allowed:
                said = f"must be one of {', '.join(allowed)} (it is {value!r})"
                yield Found("IEC233", (*where, field), said)
        yield from mount_errors(container.get("volumeMounts"), (*where, "volumeMounts"), volumes)
        yield from variable_errors(container.get("env"), (*where, "env"))


def _is_variable(name: str) -> bool:
    return bool(name) and "=" not in name and name.isascii() and name.isprintable()


def variable_errors(variables: Any, at: Location) -> Iterator[Found]:
    """Mistakes in a list of environment variables that lies at `at`."""
    for where, variable in objects_in(variables, at):
        name, source = variable.get("name"), variable.get("valueFrom")
        if isinstance(name, str) and not _is_variable(name):
            said = f"must be printable ASCII without '=' (it is {name!r})"
            yield Found("IEC233", (*where, "name"), said)
        if isinstance(source, dict) and variable.get("value"):
            yield Found("IEC228", where, "has both value and valueFrom; a variable has one of them")
        if isinstance(source, dict) and len(source) != 1:
            given = f"has {' and '.join(sorted(source))}" if source else "says nothing"
            yield Found("IEC228", (*where, "valueFrom"), f"must have exactly one source; it {given}")


_NOT_NEGATIVE = (
    "failureThreshold",
    "initialDelaySeconds",
    "periodSeconds",
    "successThreshold",
    "timeoutSeconds",
)
_HANDLERS = ("exec", "grpc", "httpGet", "tcpSocket")


def _probes(subject: Subject) -> Iterator[Found]:
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        path = f"spec.worker.probes.{name}"
        probe = subject.get(path)
        if not isinstance(probe, dict):
            continue
        handlers = [h for h in _HANDLERS if h in probe]
        if len(handlers) != 1:
            given = f"has {' and '.join(handlers)}" if handlers else "has none"
            yield Found(
                "IEC227", location(path), f"must have exactly one of {', '.join(_HANDLERS)}; it {given}"
            )
        yield from _probe_ports(subject, probe, location(path))
        if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            yield Found(
                "IEC227",
                location(path, "successThreshold"),
                "must be 1, as only a readinessProbe may ask for more",
            )
        for field in _NOT_NEGATIVE:
            value = whole(probe.get(field))
            if value is not None and value < 0:
                yield Found("IEC227", location(path, field), f"must not be negative (it is {value})")
        grace = whole(probe.get("terminationGracePeriodSeconds"))
        at = location(path, "terminationGracePeriodSeconds")
        if grace is not None and name == "readinessProbe":
            yield Found("IEC227", at, "must be left out: a readinessProbe ends no container")
        elif grace is not None and grace < 1:
            yield Found("IEC227", at, f"must be at least 1 (it is {grace})")


def _probe_ports(subject: Subject, probe: dict[str, Any], at: Location) -> Iterator[Found]:
    """Numbers that are no ports, and names that none of the engine's has."""
    own = subject.text("spec.worker.modelInvocationPort.name", "http")
    for handler in ("grpc", "httpGet", "tcpSocket"):
        given = probe.get(handler)
        port = given.get("port") if isinstance(given, dict) else None
        number = whole(port)
        if number is not None and not 1 <= number <= 65535:
            yield Found("IEC227", (*at, handler, "port"), f"must be from 1 to 65535 (it is {number})")
        elif isinstance(port, str) and port != own:
            said = f"must be a number without quotes, or {own}, the engine's port (it is {port!r})"
            yield Found("IEC227", (*at, handler, "port"), said)
    scheme = _of(probe, "httpGet", "scheme")
    if scheme and scheme not in ("HTTP", "HTTPS"):
        yield Found("IEC227", (*at, "httpGet", "scheme"), f"must be HTTP or HTTPS (it is {scheme!r})")


def _ports(subject: Subject) -> Iterator[Found]:
    path = "spec.worker.modelInvocationPort"
    port = subject.number(f"{path}.containerPort")
    if subject.text(f"{path}.name") == "grpc":
        yield Found(
            "IEC718",
            location(f"{path}.name"),
            "is grpc, but requests reach the engine over HTTP; the name changes nothing",
        )
    metrics = subject.number("spec.metrics.modelMetrics.port")
    # 8080 is the schema's default, and stands for the engine's own port.
    if metrics is not None and port in range(1, 65536) and metrics not in (port, 8080):
        yield Found(
            "IEC711",
            location("spec.metrics.modelMetrics.port"),
            f"is {metrics}, but vLLM has its metrics on the port that it serves on, {port}; use that",
        )


def _names(subject: Subject) -> Iterator[Found]:
    """Names of objects are made from the endpoint's: a Service's has at most 63 characters, begins
    with a letter and has no dot."""
    name, namespace = subject.text("metadata.name"), subject.text("metadata.namespace")
    if not name:
        return
    if not subject.disaggregated and name in _beside_engine(subject):
        said = f"is {name!r}, as a container beside the engine, which has this name, too; choose another"
        yield Found("IEC222", location("metadata.name"), said)
    longest = f"{name}-{namespace or 'default'}-routing-service" if subject.routed else name
    if len(longest) > 63 or "." in name or not name[0].isalpha():
        yield Found(
            "IEC608",
            location("metadata.name"),
            f"gives {longest!r} as a Service's name, which Kubernetes does not take: at most 63 "
            f"letters, digits and '-', "
            "beginning with a letter. Tandem makes another name of it; HyperPod does not",
        )
