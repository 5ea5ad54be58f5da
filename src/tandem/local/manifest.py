"""A manifest as `tandem up` reads it: with every mistake that `tandem validate` finds, or its warnings."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.api import ANNOTATION_CONNECTOR, Endpoint, InvalidResource, parse_endpoint, read_endpoint
from tandem.api.load import manifest_text
from tandem.api.problem import Problem
from tandem.api.validation import Finding, Report
from tandem.engine import without
from tandem.engine.validation import validate_text
from tandem.local.errors import ResourceError
from tandem.local.fields import has_local_meaning

_ABOUT_PODS = {"IEC519", "IEC705", "IEC707", "IEC709", "IEC713", "IEC723", "IEC724"}
"""Warnings of fields that have a meaning here too, about what is otherwise on one machine, or told in other
words."""
_OF_THE_MODEL = "IEC237"
"""An error that hangs on the model's sizes. Here they are known when engines are planned, which tells it."""
_ON_HYPERPOD = "IEC6"
_OF_BUILTIN_MODEL = ("--max-model-len", "--kv-cache-memory-bytes")


@dataclass(frozen=True)
class Manifest:
    endpoint: Endpoint
    raw: dict[str, Any]
    """As it is written."""
    warnings: tuple[str, ...] = ()
    """What is probably not meant so, one line each."""


def read_manifest(
    file: Path | None, *, another_model: bool = False, connector: str | None = None
) -> Manifest:
    """The one endpoint of a file, or the built-in one; that one without what its flags say of the built-in
    model's sizes where `another_model` is served. `connector`: in the place of the annotation's.

    Raises InvalidResource with what `tandem validate` calls an error, or ResourceError where there is no
    such file.
    """
    if file is None:
        text = importlib.resources.files("tandem.local").joinpath("smollm2.yaml").read_text("utf-8")
        endpoint, raw = parse_endpoint(text, source="the built-in endpoint")
        if another_model:
            worker = raw["spec"]["worker"]
            worker["args"] = [*without(worker["args"], _OF_BUILTIN_MODEL), "--max-model-len=auto"]
            endpoint = read_endpoint(raw)
        return _handing_over(Manifest(endpoint, raw), connector)
    try:
        text = manifest_text(file)
    except OSError as error:
        raise ResourceError(f"{file}: {error.strerror}") from None
    report = validate_text(text, str(file))
    if errors := [finding for finding in report.errors if finding.rule != _OF_THE_MODEL]:
        raise InvalidResource(str(file), [_problem(finding) for finding in errors])
    return _handing_over(
        Manifest(*parse_endpoint(text, source=str(file)), _warnings(report, file)), connector
    )


def _handing_over(manifest: Manifest, connector: str | None) -> Manifest:
    if connector is None:
        return manifest
    metadata = manifest.endpoint.metadata
    annotations = {**metadata.annotations, ANNOTATION_CONNECTOR: connector}
    metadata = metadata.model_copy(update={"annotations": annotations})
    return replace(manifest, endpoint=manifest.endpoint.model_copy(update={"metadata": metadata}))


def _problem(finding: Finding) -> Problem:
    """As `tandem validate` tells it."""
    return Problem(str(finding.position), f"{finding.severity} {finding.rule} {finding.said}")


def _warnings(report: Report, file: Path) -> tuple[str, ...]:
    """Those that matter on one machine, and how many others there are."""
    here = [str(finding) for finding in report.warnings if _matters(finding)]
    if others := len(report.warnings) - len(here):
        count = "1 warning is" if others == 1 else f"{others} warnings are"
        here.append(f"{count} about a cluster only: `tandem validate -f {file}` has them")
    return tuple(here)


def _matters(finding: Finding) -> bool:
    elsewhere = finding.rule in _ABOUT_PODS or finding.rule.startswith(_ON_HYPERPOD)
    return has_local_meaning(finding.path) and not elsewhere
