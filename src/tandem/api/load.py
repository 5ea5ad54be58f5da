"""Reading a manifest: YAML in, an `Endpoint` or every problem found in it out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tandem.api.models import GROUP, KIND, VERSIONS, Endpoint


@dataclass(frozen=True)
class Problem:
    """One mistake: where (field path, or a position in the file) and what."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class InvalidResource(ValueError):
    """The manifest cannot be used. `problems` holds all of them, not only the first."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{source}: " + "; ".join(str(p) for p in problems))


def load_endpoint(path: Path) -> tuple[Endpoint, dict[str, Any]]:
    """Read the one InferenceEndpointConfig of a YAML file.

    Returns the endpoint and the mapping as it was written (for listing fields that have no effect).
    Raises InvalidResource with every problem, or OSError when the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidResource(str(path), [Problem("the file", f"is not UTF-8 text: {error}")]) from None
    return parse_endpoint(text, source=str(path))


def parse_endpoint(text: str, *, source: str) -> tuple[Endpoint, dict[str, Any]]:
    """Like `load_endpoint`, from text; `source` names it in errors."""
    try:
        documents = [d for d in yaml.load_all(text, Loader=StrictLoader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        raise InvalidResource(source, [Problem(where, error.problem or "not valid YAML")]) from None
    except RecursionError:
        raise InvalidResource(source, [Problem("the file", "is nested too deeply")]) from None
    except yaml.YAMLError as error:
        raise InvalidResource(source, [Problem("the file", f"not valid YAML: {error}")]) from None

    endpoints = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if len(endpoints) != 1:
        kinds = ", ".join(str(d.get("kind")) if isinstance(d, dict) else "no object" for d in documents)
        found = str(len(endpoints)) if endpoints else kinds or "nothing"
        raise InvalidResource(
            source, [Problem("the file", f"must hold exactly one object of kind {KIND}; it holds {found}")]
        )
    raw: dict[str, Any] = endpoints[0]
    problems = _api_version_problems(raw)
    try:
        endpoint = Endpoint.model_validate(raw)
    except ValidationError as error:
        problems += [_problem(e) for e in error.errors()]
    if problems:
        raise InvalidResource(source, problems)
    return endpoint, raw


def _api_version_problems(raw: dict[str, Any]) -> list[Problem]:
    served = [f"{GROUP}/{v}" for v in VERSIONS]
    if raw.get("apiVersion", served[0]) in served:  # that it is missing, the model says
        return []
    return [Problem("apiVersion", f"is {raw.get('apiVersion')!r}; use {served[0]}")]


# Pydantic's error types in the words of YAML.
_MUST_BE = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "a whole number",
    "model_type": "an object",
    "string_type": "a string",
    "tuple_type": "a list",
}


def _problem(error: Any) -> Problem:
    """A pydantic error in the words of the resource: its field path, and the nearest name for a typo."""
    location: tuple[int | str, ...] = error["loc"]
    where = field_path(location)
    match error["type"]:
        case "missing":
            return Problem(where, "is required")
        case "extra_forbidden":
            near = difflib.get_close_matches(str(location[-1]), _known_names(location[:-1]), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return Problem(where, f"is not a field of the resource{hint}")
        case kind if kind in _MUST_BE:
            return Problem(where, f"must be {_MUST_BE[kind]} (it is {error['input']!r})")
        case _:
            message: str = error["msg"]
            return Problem(where, f"{message[0].lower()}{message[1:]} (it is {error['input']!r})")


def field_path(location: tuple[int | str, ...]) -> str:
    """('spec', 'volumes', 0, 'name') → `spec.volumes[0].name`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "the object"


def _known_names(location: tuple[int | str, ...]) -> list[str]:
    """The field names of the model at a location of the resource."""
    model: type[BaseModel] = Endpoint
    for part in location:
        if isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        found = _model_in(field.annotation) if field is not None else None
        if found is None:
            return []
        model = found
    return [f.alias or n for n, f in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `tuple[Volume, ...]` or `PdSpec | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if found := _model_in(argument):
            return found
    return None


class StrictLoader(yaml.SafeLoader):
    """Reads as the API server does: a key given twice is refused, where plain YAML lets the last one win,
    and a date is a string."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        # Here no merge key (`<<`) has been filled in yet: what it brings may be given again.
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be a name", key.start_mark)
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return node


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
