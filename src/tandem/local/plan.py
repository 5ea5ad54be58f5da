"""What one machine would start for an endpoint; nothing is started here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.api import Endpoint, PdSpec, RequestLimits, Role, Spec
from tandem.config import EngineSpec, RouterConfig, router_argv
from tandem.config.values import request_path
from tandem.engine import (
    EngineLaunch,
    EnginePlan,
    Machine,
    engine_count,
    flag_value,
    hand_off_ranks,
    int_flag,
    max_model_len,
    role_args,
    routing_strategy,
    served_model_name,
    switch,
    wants_kv_events,
)
from tandem.engine import (
    plan as plan_engines,
)
from tandem.engine.pd_buffer import CHUNK_TOKENS
from tandem.local import paths
from tandem.local.attached import AttachedEngine
from tandem.local.builtin import builtin_folder, builtin_model
from tandem.local.errors import ResourceError, raise_all
from tandem.local.fields import without_local_meaning
from tandem.local.ports import engine_ports, notify_port
from tandem.local.preflight import Start, problems
from tandem.local.process import ProcessSpec
from tandem.local.sockets import event_sockets, socket_folder
from tandem.local.source import find_model

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalPlan:
    """The processes of one endpoint on this machine."""

    name: str
    engines: tuple[EngineLaunch, ...]
    router: RouterConfig
    router_argv: tuple[str, ...]
    model: Path | None
    """None where only engines know it, which run already."""
    served_name: str
    notes: tuple[str, ...]
    unused_fields: tuple[str, ...]
    logs: Path
    sockets: Path | None = None
    """Folder of the sockets on which engines publish KV events, made for as long as the endpoint runs."""
    attached: tuple[AttachedEngine, ...] = ()
    """Engines that run already, in the place of `engines`."""
    ready_timeout: float = 600.0
    """Seconds within which all must be up and proved."""

    @property
    def url(self) -> str:
        host = f"[{self.router.host}]" if ":" in self.router.host else self.router.host
        return f"http://{host}:{self.router.port}"

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        ours = os.environ | paths.in_place_of_home()
        engines = [ProcessSpec(e.name, e.argv, e.environment(ours), e.cpus) for e in self.engines]
        return (*engines, ProcessSpec("router", self.router_argv))

    def curl(self) -> str:
        """A command line that gets an answer from the running endpoint."""
        body = (
            f'{{"model": "{self.served_name}", "messages": '
            '[{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
        )
        return (
            f"curl {self.url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, for `--json`."""
        return {
            "name": self.name,
            "url": self.url,
            "model": None if self.model is None else str(self.model),
            "engines": [
                {
                    "name": e.name,
                    "role": e.role.value,
                    "url": e.url,
                    "argv": list(e.argv),
                    "env": dict(e.env),
                    "cpus": list(e.cpus),
                    "gpus": list(e.gpus),
                }
                for e in self.engines
            ],
            "attached": [{"role": a.role.value, "url": a.spec.url} for a in self.attached],
            "router": {"argv": list(self.router_argv)},
            "notes": list(self.notes),
            "unusedFields": list(self.unused_fields),
            "logs": str(self.logs),
        }


def make_plan(
    endpoint: Endpoint,
    raw: dict[str, Any],
    machine: Machine,
    python: str,
    *,
    model: Path | None = None,
    host: str = LOOPBACK,
    port: int = 8000,
    dry: bool = False,
    check_memory: bool = True,
    warnings: Sequence[str] = (),
    on_convert: Callable[[], None] = lambda: None,
) -> LocalPlan:
    """Work out every process of an endpoint. `python` runs the router; `warnings` become the first notes.

    Looks for all that would keep it from starting (`tandem.local.preflight`), too little memory only where
    `check_memory`, and converts the built-in model on first use (`on_convert` is called first); neither when
    it is `dry`, to be looked at only.
    Raises LocalError, or ValueError from rendering, with what must be changed.
    """
    require_pd_spec(endpoint)
    cache = paths.model_cache()
    folder = find_model(endpoint, model, lambda: builtin_folder(cache))
    logs = paths.state(endpoint.metadata.name) / str(port)
    ranks = hand_off_ranks(endpoint, machine)
    ports = engine_ports(engine_count(endpoint), LOOPBACK, but={port}, ranks=ranks)
    notify = notify_port(LOOPBACK, but={port}) if ranks else None
    sockets = socket_folder(ports[0].http) if wants_kv_events(endpoint) else None
    if sockets is not None:
        ports = [replace(p, kv_events=event_sockets(sockets, p.http)) for p in ports]

    def planned() -> EnginePlan:
        return plan_engines(endpoint, machine, folder, ports, host=LOOPBACK, notify_port=notify)

    engines = planned()
    if not dry:
        start = Start(
            endpoint, engines.engines, machine, folder, host=host, port=port, logs=logs, cache=cache
        )
        raise_all(problems(start, memory=check_memory))
        if start.is_builtin:
            builtin_model(cache, machine.python, on_convert=on_convert)
            engines = planned()  # by its config.json
    router, notes = router_for(
        endpoint,
        folder,
        host=host,
        port=port,
        prefill=_for_router(engines.engines, Role.PREFILL),
        decode=_for_router(engines.engines, Role.DECODE),
        kv_block_size=_block_size(endpoint, machine),
        max_model_len=max_model_len(endpoint),
        hand_off=_hand_off(engines),
    )
    return LocalPlan(
        name=endpoint.metadata.name,
        engines=engines.engines,
        router=router,
        router_argv=router_command(python, router),
        model=folder,
        served_name=served_model_name(endpoint),
        notes=(*warnings, *engines.notes, *notes),
        unused_fields=tuple(without_local_meaning(raw)),
        logs=logs,
        sockets=sockets,
    )


def require_pd_spec(endpoint: Endpoint) -> PdSpec:
    """Raises ResourceError where an endpoint is not disaggregated."""
    if endpoint.spec.pd_spec is None:
        raise ResourceError("spec.pdSpec is missing: `tandem up` runs disaggregated endpoints.")
    return endpoint.spec.pd_spec


def router_for(
    endpoint: Endpoint,
    folder: Path | None,
    *,
    host: str,
    port: int,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    kv_block_size: int,
    max_model_len: int | None,
    hand_off: Mapping[str, Any] | None = None,
) -> tuple[RouterConfig, list[str]]:
    """The router that an endpoint asks for, and notes on what of it does nothing. `folder` has the model's
    tokenizer; None: engines count. `hand_off`: what it has to know of another connector than NIXL."""
    spec = endpoint.spec
    args = role_args(endpoint, Role.DECODE)
    notes: list[str] = []
    tokenizer = flag_value(args, "--tokenizer")
    countable = folder is not None and (tokenizer is None or Path(tokenizer).is_dir())
    if folder is not None and not countable:
        notes.append(f"--tokenizer {tokenizer}: is no folder on this machine, so engines count the prompts")
    limits = spec.worker.request_limits or RequestLimits()
    if limits.max_queue_size and limits.max_concurrent_requests is None:
        notes.append("spec.worker.requestLimits: without maxConcurrentRequests nothing is limited or queued")
    router = RouterConfig(
        host=host,
        port=port,
        prefill=prefill,
        decode=decode,
        invocation_path=_invocation_path(spec),
        routing_threshold=require_pd_spec(endpoint).routing_threshold,
        routing_strategy=routing_strategy(endpoint),
        kv_block_size=kv_block_size,
        model_path=str(folder) if countable else None,
        tokenizer=tokenizer if countable else None,
        chat_template=flag_value(args, "--chat-template"),
        chat_template_content_format=flag_value(args, "--chat-template-content-format") or "auto",
        default_chat_template_kwargs=flag_value(args, "--default-chat-template-kwargs"),
        exclude_tools_when_tool_choice_none=bool(switch(args, "--exclude-tools-when-tool-choice-none")),
        max_model_len=max_model_len,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_queue_size=limits.max_queue_size or 0,
        overflow_status_code=limits.overflow_status_code,
        explain=True,
        **(hand_off or {}),
    )
    return router, notes


def _hand_off(engines: EnginePlan) -> dict[str, Any]:
    """What the router has to know where KV goes through LMCache."""
    how = engines.lmcache
    if how is None:
        return {}
    return {
        "connector": "lmcache",
        "lmcache_receivers": tuple(e.receiver for e in engines.engines if e.receiver is not None),
        "lmcache_notify": f"{how.host}:{how.notify_port}",
        "lmcache_chunk_size": CHUNK_TOKENS,
        "lmcache_buffer_chunks": how.buffer.chunks,
        "lmcache_ranks": how.ranks,
        "lmcache_step_tokens": how.step_tokens,
    }


def router_command(python: str, router: RouterConfig) -> tuple[str, ...]:
    """The command line of a router that `python` runs."""
    # -P: a file in the working directory must not stand in for a module.
    return (python, "-P", "-m", "tandem", "router", *router_argv(router))


def _for_router(engines: Sequence[EngineLaunch], role: Role) -> tuple[str, ...]:
    return tuple(EngineSpec(e.url, kv_events=e.kv_events).text for e in engines if e.role is role)


def _invocation_path(spec: Spec) -> str:
    try:
        request_path(spec.invocation_path)
    except ValueError as error:
        raise ResourceError(f"spec.invocationEndpoint: {error}") from None
    return spec.invocation_path


def _block_size(endpoint: Endpoint, machine: Machine) -> int:
    """Tokens of a prefill engine's KV blocks: its flag's, else vLLM's default."""
    given = int_flag(role_args(endpoint, Role.PREFILL), "--block-size")
    return given or (128 if machine.accelerator == "cpu" else 16)
