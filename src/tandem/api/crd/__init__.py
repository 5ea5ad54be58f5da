"""The CustomResourceDefinition of `InferenceEndpointConfig`, and its schemas as data."""

from tandem.api.crd.definition import NAME, PLURAL, SHORT_NAME, crd
from tandem.api.crd.schemas import absent_fields, annotation_schemas, spec_and_status
from tandem.api.crd.structural import schema_problems, with_whole_numbers, without_defaults, without_nulls

__all__ = [
    "NAME",
    "PLURAL",
    "SHORT_NAME",
    "absent_fields",
    "annotation_schemas",
    "crd",
    "schema_problems",
    "spec_and_status",
    "with_whole_numbers",
    "without_defaults",
    "without_nulls",
]
