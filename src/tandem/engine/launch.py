"""The engines of one endpoint on one machine: each one's command line, environment, and cores or GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.api import Endpoint, Role
from tandem.config import Subscription
from tandem.engine import cpu, kv_events
from tandem.engine.args import POSITIONALS, has_flag, settings, switch, without
from tandem.engine.errors import EngineError
from tandem.engine.hand_off import LMCacheHandOff, lmcache_hand_off
from tandem.engine.kv_transfer import (
    KV_LEASE_SECONDS,
    ConnectorChoice,
    choose_connector,
    kv_transfer_config,
    startable_connector,
)
from tandem.engine.lmcache import hand_off_flags
from tandem.engine.machine import Core, Machine, share_cores, share_gpus
from tandem.engine.roles import (
    API_SERVER,
    HIDING_FLAGS,
    engine_count,
    int_flag,
    literal_environment,
    model_config,
    pd_spec,
    role_args,
    served_model_name,
    served_model_names,
    sources,
)
from tandem.engine.step_size import decode_note, step_tokens

_UNUSABLE_FLAGS = dict.fromkeys(
    HIDING_FLAGS, "engines listen where Tandem's router finds them, over plain HTTP"
)
_NOT_HERE = {"--data-parallel-size": "run more replicas instead", "--nnodes": "an engine is on one machine"}
_DEFAULT_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # a file in the working directory must not stand in for a module
}


@dataclass(frozen=True)
class EnginePorts:
    http: int
    side_channel: int
    """Where decoders fetch NIXL metadata of this engine."""
    kv_events: Subscription | None = None
    """Where it publishes KV events; None leaves that to its own flags."""
    init: tuple[int, ...] = ()
    alloc: tuple[int, ...] = ()
    """Where the ranks of a decoder take KV through LMCache: a port of each kind for each."""


@dataclass(frozen=True)
class EngineLaunch:
    """How one engine is started."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What is added to the environment; `environment` gives the whole of it."""
    not_inherited: tuple[str, ...]
    """Variables of the starting process that must not reach the engine."""
    cpus: tuple[int, ...]
    """Logical CPUs to pin the process to before it starts; () on a GPU."""
    gpus: tuple[str, ...]
    port: int
    side_channel_port: int
    host: str
    kv_events: Subscription | None = None
    """Where it publishes KV events, if it was told to."""
    receiver: str | None = None
    """Where it takes KV through LMCache, as the router's `--lmcache-receivers` has it."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The engine's whole environment, given that of whoever starts it."""
        return {**{k: v for k, v in inherited.items() if k not in self.not_inherited}, **self.env}


@dataclass(frozen=True)
class EnginePlan:
    engines: tuple[EngineLaunch, ...]
    """Prefillers first."""
    served_model_name: str
    connector: ConnectorChoice
    spare_cpus: tuple[int, ...]
    """Logical CPUs that no engine is pinned to; () when all are given out, and on a GPU."""
    notes: tuple[str, ...]
    """What of the manifest was replaced or left out, and what was decided; one line each."""
    lmcache: LMCacheHandOff | None = None
    """How KV is handed over, with that connector."""


def plan(
    endpoint: Endpoint,
    machine: Machine,
    model: Path,
    ports: Sequence[EnginePorts],
    *,
    host: str = "127.0.0.1",
    notify_port: int | None = None,
    lease_seconds: int = KV_LEASE_SECONDS,
) -> EnginePlan:
    """The engines of `endpoint` on `machine`, all serving the model directory `model`.

    `ports` has one entry per engine (`engine_count`), prefillers first; `wants_kv_events` tells whether they
    should have an endpoint for KV events, `hand_off_ranks` how many ports LMCache takes. `notify_port`: where
    LMCache tells the router of hand-offs. Reads only `model`/config.json.
    Raises EngineError when the endpoint cannot run here.
    """
    roles = [(role, i) for role in Role for i in range(pd_spec(endpoint).role(role).replicas)]
    if len(ports) != len(roles):
        raise ValueError(f"{len(roles)} engines need as many ports; {len(ports)} were given")
    names = [f"{role}-{i}" for role, i in roles]
    model_name = served_model_name(endpoint)
    connector, note = local_connector(endpoint, machine)
    notes = _Notes()
    notes.add(note)
    cores: Sequence[Sequence[Core]] = [()] * len(roles)
    gpus: Sequence[tuple[str, ...]] = [()] * len(roles)
    rest: Sequence[Core] = ()
    if machine.accelerator == "cpu":
        shares = share_cores(machine, len(roles))
        cores, rest = shares.engines, shares.rest
        notes.add(shares.note)
    each = len(cores[0])
    args = {role: _role_flags(endpoint, machine, role, model, connector, each, notes) for role in Role}
    hand_off = None
    if connector.name == "lmcache":
        if notify_port is None:
            raise ValueError("LMCache needs a port on which the router is told of hand-offs")
        hand_off = lmcache_hand_off(
            endpoint, machine, model, args, engines=len(roles), host=host, notify_port=notify_port
        )
        for decided in hand_off.notes:
            notes.add(decided)
        args = {role: hand_off_flags(role, args[role], hand_off.step_tokens) for role in Role}
    elif endpoint.spec.kv_cache_spec:
        notes.add("spec.kvCacheSpec: without effect, as the engines run without LMCache")
    for (role, _), port in zip(roles, ports, strict=True):
        if port.kv_events is not None:
            _note_kv_events(endpoint, role, args[role], notes)
    if machine.accelerator != "cpu":
        gpus = share_gpus(
            machine, [(n, _gpus_needed(args[role])) for n, (role, _) in zip(names, roles, strict=True)]
        )

    engines = []
    for i, (role, _) in enumerate(roles):
        owned = _owned_environment(machine, host, ports[i].side_channel, cores[i], gpus[i])
        defaults: dict[str, str] = {}
        if hand_off is not None:
            owned |= hand_off.variables(role, ports[i].init, ports[i].alloc)
            defaults = hand_off.default_variables(role)
        env = _environment(endpoint, machine, args[role], defaults, owned, notes)
        transfer = kv_transfer_config(
            connector, role, machine.accelerator, lease_seconds=lease_seconds, name=f"{role}-{ports[i].http}"
        )
        flags = [*args[role], "--kv-transfer-config", transfer, "--model", str(model)]
        flags += ["--host", host, "--port", str(ports[i].http)]
        where = ports[i].kv_events
        if where is not None:
            flags = kv_events.publishing_args(flags, where)
        engines.append(
            EngineLaunch(
                name=names[i],
                role=role,
                argv=(machine.python, "-m", API_SERVER, *flags),
                env=env,
                not_inherited=tuple(n for n in cpu.NOT_INHERITED if n not in env) if cores[i] else (),
                cpus=_logical(cores[i]),
                gpus=gpus[i],
                port=ports[i].http,
                side_channel_port=ports[i].side_channel,
                host=host,
                kv_events=where,
                receiver=None if hand_off is None or role is Role.PREFILL else _receiver(host, ports[i]),
            )
        )
    return EnginePlan(tuple(engines), model_name, connector, _logical(rest), notes.lines, hand_off)


def local_connector(endpoint: Endpoint, machine: Machine) -> tuple[ConnectorChoice, str | None]:
    """How engines on this machine hand over, and a note where that is not what the resource chooses."""
    return startable_connector(choose_connector(endpoint), lmcache=machine.lmcache)


def hand_off_ranks(endpoint: Endpoint, machine: Machine) -> int:
    """For how many ranks a decoder takes KV through LMCache; 0 where it is handed over otherwise."""
    if local_connector(endpoint, machine)[0].name != "lmcache":
        return 0
    if machine.accelerator == "cpu":
        return 1
    return int_flag(role_args(endpoint, Role.DECODE), "--tensor-parallel-size") or 1


def _receiver(host: str, ports: EnginePorts) -> str:
    init, alloc = (",".join(map(str, each)) for each in (ports.init, ports.alloc))
    return f"{host}:{init}:{alloc}"


@dataclass
class _Notes:
    """Notes in the order of their first mention, each once."""

    _seen: dict[str, None] = field(default_factory=dict)

    def add(self, note: str | None) -> None:
        if note:
            self._seen[note] = None

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._seen)


def _role_flags(
    endpoint: Endpoint,
    machine: Machine,
    role: Role,
    model: Path,
    connector: ConnectorChoice,
    cores: int,
    notes: _Notes,
) -> list[str]:
    """A role's flags, less those that are an engine's own, the model and the connector: the manifest's that
    have a place here, and Tandem's own.

    `cores`: of each engine, on a CPU."""
    on_cpu = machine.accelerator == "cpu"
    unusable = {**_UNUSABLE_FLAGS, **(cpu.UNUSABLE_FLAGS if on_cpu else {})}
    replaced = {
        "--host": "the address Tandem chose",
        "--port": "the port Tandem chose",
        "--model": f"the model on this machine, {model}",
        POSITIONALS: f"the model on this machine, {model}",
        "--kv-transfer-config": f"the configuration for {connector.reason}",
        **({flag: f"{value}, {why}" for flag, (value, why) in cpu.OWNED_FLAGS.items()} if on_cpu else {}),
    }
    _note_flags(endpoint, role, replaced, unusable, notes)

    args = without(role_args(endpoint, role), [*unusable, *replaced])
    for flag, instead in _NOT_HERE.items():
        if (int_flag(args, flag) or 1) > 1:
            raise EngineError(
                f"{flag} of spec.worker.args or spec.pdSpec: is not supported on one machine; {instead}."
            )
    if on_cpu:
        step = step_tokens(args, role, config=model_config(model), cores=cores)
        kv_bytes = cpu.kv_bytes_per_engine(machine.memory_bytes, engine_count(endpoint))
        environment = literal_environment(endpoint)
        own = cpu.default_flags(args, step=step, kv_bytes=kv_bytes, environment=environment)
        if role is Role.DECODE and has_flag(own, "--max-num-batched-tokens"):
            notes.add(decode_note(step, model_config(model), cores))
        args += own
        for flag, (value, _) in cpu.OWNED_FLAGS.items():
            args += [flag, value]
    if not has_flag(args, "--served-model-name"):
        args += ["--served-model-name", *served_model_names(endpoint, role)]
    if not has_flag(args, "--enable-prompt-tokens-details"):
        args += ["--enable-prompt-tokens-details"]  # usage tells how many prompt tokens came from a cache
    return args


def _note_flags(
    endpoint: Endpoint,
    role: Role,
    replaced: Mapping[str, str],
    unusable: Mapping[str, str],
    notes: _Notes,
) -> None:
    for source in sources(endpoint, role):
        for setting in settings(source.args):
            written = str(setting) if len(str(setting)) <= 60 else f"{setting.flag} …"
            if setting.flag in replaced:
                notes.add(f"{written} of {source.path}: replaced by {replaced[setting.flag]}")
            elif setting.flag in unusable and setting.values != ("1",):
                notes.add(f"{written} of {source.path}: left out; {unusable[setting.flag]}")
            elif setting.flag == "--config":
                notes.add(f"{written} of {source.path}: Tandem does not see the flags in that file")


def _note_kv_events(endpoint: Endpoint, role: Role, args: Sequence[str], notes: _Notes) -> None:
    """Notes for engines of a role that are told to publish KV events."""
    instead = "one with the endpoints that Tandem chose; its other settings are kept"
    _note_flags(endpoint, role, {kv_events.FLAG: instead}, {}, notes)
    if switch(args, "--enable-prefix-caching") is False:
        notes.add(
            f"--no-enable-prefix-caching: {role.value} engines keep no prefixes, so the strategy kvaware "
            "finds none there and goes by their load"
        )


def _owned_environment(
    machine: Machine, host: str, side_channel: int, cores: Sequence[Core], gpus: Sequence[str]
) -> dict[str, str]:
    """Variables that Tandem decides, whatever the manifest says."""
    by_accelerator = (
        cpu.owned_environment(len(cores))
        if machine.accelerator == "cpu"
        else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    )
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        **by_accelerator,
    }


def _environment(
    endpoint: Endpoint,
    machine: Machine,
    args: Sequence[str],
    defaults: Mapping[str, str],
    owned: Mapping[str, str],
    notes: _Notes,
) -> dict[str, str]:
    """`defaults`: beside those of every engine."""
    defaults = {**_DEFAULT_ENVIRONMENT, **defaults}
    if machine.accelerator == "cpu":
        defaults |= cpu.default_environment(args)
    path = "spec.worker.environmentVariables"
    given = literal_environment(endpoint)
    for variable in endpoint.spec.worker.environment_variables:
        if variable.value_from is not None:
            notes.add(f"{path}[{variable.name}].valueFrom: has no meaning outside a cluster; give it a value")
        elif variable.name in owned:
            notes.add(f"{variable.name} of {path}: replaced; Tandem sets it for each engine")
    return {**defaults, **given, **owned}


def _gpus_needed(args: Sequence[str]) -> int:
    return (int_flag(args, "--tensor-parallel-size") or 1) * (int_flag(args, "--pipeline-parallel-size") or 1)


def _logical(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted({cpu_id for core in cores for cpu_id in core.cpus}))
