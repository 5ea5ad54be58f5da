"""Rules across fields, one module for each part of the resource. A check reads a `Subject` and yields what
it finds."""

from tandem.api.validation.checks.extensions import annotation_checks
from tandem.api.validation.checks.placement import placement_checks
from tandem.api.validation.checks.pods import pod_checks
from tandem.api.validation.checks.resources import resource_checks
from tandem.api.validation.checks.routing import routing_checks
from tandem.api.validation.checks.scaling import scaling_checks
from tandem.api.validation.checks.source import source_checks
from tandem.api.validation.checks.unused import unused_checks

CHECKS = (
    source_checks,
    pod_checks,
    resource_checks,
    routing_checks,
    scaling_checks,
    placement_checks,
    unused_checks,
    annotation_checks,
)

__all__ = ["CHECKS"]
