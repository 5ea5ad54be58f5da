"""What a role's engines are told, wherever they run: flags, environment, the model's name and context."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api import Endpoint, PdSpec, Role
from tandem.api.models import EnvVar, IntelligentRoutingSpec
from tandem.engine.args import MOST, POSITIONALS, flag_value, flag_values, int_value, merge_args, settings
from tandem.engine.errors import EngineError

API_SERVER = "vllm.entrypoints.openai.api_server"

HIDING_FLAGS = (
    "--uds",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-cert-reqs",
    "--headless",
)
"""Flags with which an engine does not serve plain HTTP on its port, where Tandem's router looks for it."""

MOST_TEXT = 128 << 10
"""Bytes of a variable or an argument: Linux starts no program with a longer one (MAX_ARG_STRLEN)."""

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")


@dataclass(frozen=True)
class Source:
    """One field of the resource that holds flags, with its `$(NAME)` references filled in."""

    path: str
    args: tuple[str, ...]


def pd_spec(endpoint: Endpoint) -> PdSpec:
    """`spec.pdSpec`. Raises EngineError when the endpoint is not disaggregated."""
    if endpoint.spec.pd_spec is None:
        raise EngineError(
            "spec.pdSpec: is required: Tandem runs endpoints with separate prefill and decode engines"
        )
    return endpoint.spec.pd_spec


def engine_count(endpoint: Endpoint) -> int:
    """Prefillers and decoders together."""
    return sum(pd_spec(endpoint).role(role).replicas for role in Role)


def routing_strategy(endpoint: Endpoint) -> str:
    """`spec.intelligentRoutingSpec.routingStrategy`, or its default."""
    routing = endpoint.spec.intelligent_routing_spec or IntelligentRoutingSpec()
    return routing.routing_strategy


def literal_environment(endpoint: Endpoint) -> dict[str, str]:
    """`spec.worker.environmentVariables` that have a literal value, in the manifest's order."""
    values: dict[str, str] = {}
    for variable in endpoint.spec.worker.environment_variables:
        if variable.value_from is None:
            field = f"spec.worker.environmentVariables[{variable.name}].value"
            values[variable.name] = _filled(variable.value or "", values, field)
    return values


def with_variables(endpoint: Endpoint, variables: Iterable[EnvVar]) -> Endpoint:
    """The endpoint with variables added to `spec.worker.environmentVariables`; of the same name they replace
    those, as a role's annotation does."""
    own = tuple(variables)
    replaced = {variable.name for variable in own}
    worker = endpoint.spec.worker
    kept = (v for v in worker.environment_variables if v.name not in replaced)
    worker = worker.model_copy(update={"environment_variables": (*kept, *own)})
    return endpoint.model_copy(update={"spec": endpoint.spec.model_copy(update={"worker": worker})})


def expand(text: str, values: Mapping[str, str]) -> str:
    """Kubernetes' `$(NAME)`: replaced when NAME is known, else left as it stands; `$$` is a dollar sign.

    Raises EngineError where it comes to more than MOST_TEXT: ten variables that each name the one before ten
    times are beyond all memory.
    """
    if expanded_size(text, lambda name: len(values.get(name, ""))) >= MOST_TEXT:
        raise EngineError(TOO_LONG)

    def replacement(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else values.get(match[2], match[0])

    return _REFERENCE.sub(replacement, text)


def _filled(text: str, values: Mapping[str, str], field: str) -> str:
    try:
        return expand(text, values)
    except EngineError as error:
        raise EngineError(f"{field}: {error}") from None


TOO_LONG = f"comes to {MOST_TEXT} bytes or more with its references filled in; no program starts with that"


def references(text: str) -> Iterator[str]:
    """The names that `expand` fills in, each as often as it stands there."""
    return (match[2] for match in _REFERENCE.finditer(text) if match[2])


def expanded_size(text: str, size: Callable[[str], int]) -> int:
    """About how long `expand` would make a text (never less); `size` is the length of a variable's value, 0
    of one that is not known."""
    return len(text) + sum(map(size, references(text)))


def sources(endpoint: Endpoint, role: Role) -> tuple[Source, ...]:
    """Where a role's flags come from, weakest first: command (`vllm serve MODEL`), worker.args, its own."""
    worker, spec = endpoint.spec.worker, pd_spec(endpoint).role(role)
    field = "prefillSpec" if role is Role.PREFILL else "decodingSpec"
    values = literal_environment(endpoint)
    return tuple(
        Source(path, tuple(_filled(arg, values, path) for arg in args))
        for path, args in (
            ("spec.worker.command", _flags_of_command(worker.command)),
            ("spec.worker.args", _less_program(worker.args)),
            (f"spec.pdSpec.{field}.args", spec.args),
        )
        if args
    )


def role_args(endpoint: Endpoint, role: Role) -> list[str]:
    """The role's flags: its own laid over those of `spec.worker`."""
    merged: list[str] = []
    for source in sources(endpoint, role):
        merged = merge_args(merged, source.args)
    return merged


def model_argument(args: Iterable[str]) -> str | None:
    """The model as flags name it: `--model`, else the positional of `vllm serve MODEL`."""
    args = list(args)
    return flag_value(args, "--model") or flag_value(args, POSITIONALS)


def served_model_names(endpoint: Endpoint, role: Role) -> tuple[str, ...]:
    """What a role's engines answer to: `--served-model-name`, else the model as the manifest names it.

    The manifest's name, not a local path that replaces it: clients of `--model /opt/ml/model` send that.
    """
    args = role_args(endpoint, role)
    return flag_values(args, "--served-model-name") or (model_argument(args) or endpoint.spec.model_name,)


def served_model_name(endpoint: Endpoint) -> str:
    """The model's name for clients: the first served one. Raises EngineError when the roles differ."""
    prefill, decode = (served_model_names(endpoint, role) for role in (Role.PREFILL, Role.DECODE))
    if not set(decode) <= set(prefill):
        raise EngineError(
            f"spec.pdSpec: decoders serve {', '.join(decode)} and prefillers {', '.join(prefill)}; both get "
            "the same requests. Set --model or --served-model-name in spec.worker.args, not for one role."
        )
    return decode[0]


def max_model_len(endpoint: Endpoint) -> int | None:
    """The smaller `--max-model-len` of the two roles in tokens; None when neither sets one.

    Raises EngineError for a value that is not a number.
    """
    given = [length for role in Role if (length := int_flag(role_args(endpoint, role), "--max-model-len"))]
    return min(given, default=None)


def int_flag(args: Iterable[str], flag: str, most: int = MOST) -> int | None:
    """`int_value`, with an error that names the resource."""
    try:
        return int_value(args, flag, most)
    except ValueError as error:
        raise EngineError(f"spec.worker.args or spec.pdSpec: {error}") from None


def model_config(model: Path) -> dict[str, Any]:
    """A model's config.json, of a multimodal model the part on text; empty when there is none to read."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    text = config.get("text_config", config) if isinstance(config, dict) else None
    return text if isinstance(text, dict) else {}


def _flags_of_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Flags that a command hands to vLLM; what starts vLLM itself is Tandem's own choice."""
    for start in ("serve", API_SERVER):
        if start in command:
            return command[command.index(start) + 1 :]
    return ()


def _less_program(args: tuple[str, ...]) -> tuple[str, ...]:
    """`vllm serve MODEL …` and `serve MODEL …` without the words that start the server."""
    first = next(iter(settings(args)), None)
    if first is None or first.flag != POSITIONALS or "serve" not in first.values:
        return args
    return args[args.index("serve") + 1 :]
