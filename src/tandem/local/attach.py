"""A router before engines that run already, in the place of engines that `tandem up` would start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.api import Endpoint, Role
from tandem.engine import choose_connector, served_model_name, wants_kv_events
from tandem.local import paths
from tandem.local.attached import AttachedEngine, look_at
from tandem.local.builtin import builtin_folder
from tandem.local.errors import ResourceError
from tandem.local.fields import without_local_meaning
from tandem.local.plan import LOOPBACK, LocalPlan, require_pd_spec, router_command, router_for
from tandem.local.ports import require_free
from tandem.local.source import find_model

_READY_SECONDS = 180.0  # for canaries, which wait behind what the engines are at


def attach_plan(
    endpoint: Endpoint,
    raw: dict[str, Any],
    prefill: Sequence[str],
    decode: Sequence[str],
    python: str,
    *,
    given: bool,
    model: Path | None = None,
    host: str = LOOPBACK,
    port: int = 8000,
    dry: bool = False,
    warnings: Sequence[str] = (),
) -> LocalPlan:
    """A router alone, before engines that run already: `prefill` and `decode` are as the router's flags have
    them. The endpoint tells how to route, and where it was `given` also the model and its template; what is
    built in has a model of its own. `warnings` become the first notes.

    Asks every engine, also when it is `dry`. Raises LocalError or ValueError with what must be changed.
    """
    require_pd_spec(endpoint)
    roles = {Role.PREFILL: prefill, Role.DECODE: decode}
    engines = look_at([(role, text) for role, texts in roles.items() for text in texts])
    name = _common_name(engines, served_model_name(endpoint) if given else None)
    notes = _attach_notes(endpoint, engines)
    folder: Path | None = None
    try:
        if given or model is not None:
            folder = find_model(endpoint, model, _converted)
    except ResourceError as error:
        if model is not None:
            raise
        notes.append(f"engines count the prompts, as no tokenizer is here: {error}")
    if not dry:
        require_free(port, host)
    sizes = [e.block_size for e in engines if e.role is Role.PREFILL and e.block_size]
    router, more = router_for(
        endpoint,
        folder,
        host=host,
        port=port,
        prefill=tuple(e.spec.text for e in engines if e.role is Role.PREFILL),
        decode=tuple(e.spec.text for e in engines if e.role is Role.DECODE),
        kv_block_size=sizes[0] if sizes else 16,
        max_model_len=None,  # they tell it themselves
    )
    return LocalPlan(
        name=endpoint.metadata.name,
        engines=(),
        router=router,
        router_argv=router_command(python, router),
        model=folder,
        served_name=name,
        notes=(*warnings, *notes, *more),
        unused_fields=tuple(without_local_meaning(raw)) if given else (),
        logs=paths.state(endpoint.metadata.name) / str(port),
        attached=engines,
        ready_timeout=_READY_SECONDS,
    )


def renamed(endpoint: Endpoint) -> Endpoint:
    """The built-in endpoint with other engines, which is not what its name says."""
    metadata = endpoint.metadata.model_copy(update={"name": "attached"})
    return endpoint.model_copy(update={"metadata": metadata})


def _converted() -> Path:
    """The built-in model, where it has been converted."""
    folder = builtin_folder(paths.model_cache())
    if not folder.is_dir():
        raise ResourceError("the built-in model has not been converted on this machine")
    return folder


def _common_name(engines: Sequence[AttachedEngine], wanted: str | None) -> str:
    """The model's name for clients: the one that the resource names, else the first that engines of both
    roles serve. Raises ResourceError where there is none."""
    by_role = {role: [e for e in engines if e.role is role] for role in Role}
    for engine in engines:
        others = by_role[Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL]
        if not any(set(engine.models) & set(other.models) for other in others):
            theirs = sorted({name for other in others for name in other.models})
            raise ResourceError(
                f"{engine.named} serves {', '.join(engine.models)}, and the engines of the other role serve "
                f"{', '.join(theirs)}. Both get the same requests: start them with the same "
                "--served-model-name."
            )
    common = [
        name
        for engine in by_role[Role.DECODE]
        for name in engine.models
        if any(name in other.models for other in by_role[Role.PREFILL])
    ]
    if wanted is not None and wanted not in common:
        raise ResourceError(
            f"spec.worker.args: names the model {wanted!r} (--served-model-name, else --model, else "
            f"spec.modelName), and the engines serve {', '.join(dict.fromkeys(common))}. Correct the one, or "
            "start the others with --served-model-name."
        )
    return wanted or common[0]


def _attach_notes(endpoint: Endpoint, engines: Sequence[AttachedEngine]) -> list[str]:
    notes = []
    givers = [e for e in engines if e.role is Role.DECODE and not e.takes_kv]
    if any(e.role is Role.PREFILL and e.takes_kv for e in engines):
        # NIXL does not mind the role; who has mixed up the URLs does.
        notes += [
            f"{e.named}: was started as kv_producer, and a prefill engine as one that takes KV: are the URLs "
            "mixed up?"
            for e in givers
        ]
    if wants_kv_events(endpoint):
        notes += [
            f"{e.named}: routingStrategy kvaware needs to know where it publishes KV events; give "
            f"{e.spec.url},kv-events=tcp://HOST:PORT"
            for e in engines
            if e.spec.kv_events is None
        ]
    if choose_connector(endpoint).name != "nixl":
        notes.append(f"{choose_connector(endpoint).reason}; engines that run already are used through NIXL")
    return notes
