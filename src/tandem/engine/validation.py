"""Judging a resource with its engines in mind: their flags and environment, and whether the roles fit
together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from tandem.api import Endpoint, Role
from tandem.api import validation as of_resource
from tandem.api.annotations import PREFIX, parse_annotations
from tandem.api.conventions import DEFAULT_MOUNT
from tandem.api.crd.structural import Location
from tandem.api.models import GROUP, KIND, EnvVar
from tandem.api.validation import Found, Lines, Report, Subject
from tandem.api.validation.checks.resources import gpus
from tandem.api.validation.subject import location, objects_in
from tandem.engine import roles
from tandem.engine.args import flag_value, switch
from tandem.engine.errors import EngineError
from tandem.engine.flag_checks import Flags, flag_findings
from tandem.engine.kv_events import MOST_RANKS
from tandem.engine.kv_transfer import choose_connector
from tandem.engine.pair_checks import pair_checks
from tandem.engine.pod_ports import taken_ports
from tandem.engine.roles import MOST_TEXT, TOO_LONG, expanded_size
from tandem.engine.variable_checks import OF_ALL, owned_checks, value_checks

_PD = "spec.pdSpec"
_ROUTING = "spec.intelligentRoutingSpec"
_CACHE = "spec.kvCacheSpec"
_SPECS = {Role.PREFILL: f"{_PD}.prefillSpec", Role.DECODE: f"{_PD}.decodingSpec"}
_COMMAND_LINES = ("spec.worker.command", "spec.worker.args", *(f"{path}.args" for path in _SPECS.values()))
MOST_WORDS = 1000
"""Of one list of flags; vLLM has some 250."""

MOST_TEXTS = 2 << 20
"""Bytes of all arguments of one engine, and of all its variables: Linux starts no program with more (ARG_MAX,
a quarter of a stack of 8 MiB)."""


def validate(
    resource: Mapping[str, Any],
    *,
    lines: Lines | None = None,
    model_config: Mapping[str, Any] | None = None,
    stored: bool = False,
) -> Report:
    """Judge one resource: as `tandem.api.validation.validate` does, and with its engines in mind.

    `model_config` is what the model's config.json says; with it the PD buffer is compared with the longest
    prompt exactly. A resource of any shape is judged; nothing is raised.
    """
    return of_resource.validate(
        resource,
        lines=lines,
        checks=[lambda subject: engine_checks(subject, model_config)],
        stored=stored,
    )


def validate_text(text: str, source: str, *, model_config: Mapping[str, Any] | None = None) -> Report:
    """Judge every resource of a manifest's text, and the text itself; `source` names it in positions."""
    manifest = of_resource.read_manifest(text, source)
    found = Report(tuple(manifest.findings))
    for document in manifest.documents:
        found += validate(document.resource, lines=document.lines, model_config=model_config)
    return found


def engine_checks(subject: Subject, model_config: Mapping[str, Any] | None = None) -> Iterator[Found]:
    """What is found about the engines, as far as the resource can be read."""
    yield from value_checks(subject)
    subject = _with_words(subject)
    if not all(_is_command_line(subject.get(path)) for path in _COMMAND_LINES):
        return  # the schema's matter; what is left of the flags would be misread
    own = _role_variables(subject)
    if too_large := list(_too_large(subject, own)):
        yield from too_large
        return  # nothing else is read of what no program could be started with
    yield from _references(subject, own)
    endpoint = readable(subject)
    if endpoint is None:
        return
    of_role = {role: _flags(subject, roles.with_variables(endpoint, own[role]), role) for role in Role}
    for role in Role if subject.disaggregated else (Role.DECODE,):
        yield from flag_findings(of_role[role])
        yield from _gpus(subject, of_role[role])
        yield from _places(subject, of_role[role])
        yield from _taken(subject, of_role[role])
    if subject.disaggregated:
        yield from pair_checks(subject, endpoint, of_role, model_config)
    yield from _caches(subject, endpoint)
    yield from _port(subject, endpoint, of_role)
    if subject.routed:
        yield from _caching(subject, of_role)


def _role_variables(subject: Subject) -> dict[Role, list[EnvVar]]:
    """What the annotations add to each role's environment."""
    extensions, _ = parse_annotations(subject.annotations if subject.disaggregated else {})
    return {role: [EnvVar.model_validate(v) for v in extensions.roles[role].env] for role in Role}


def _too_large(subject: Subject, own: Mapping[Role, list[EnvVar]]) -> Iterator[Found]:
    """Command lines and variables beyond all use. Only lengths are summed up: what ten variables come to that
    each name the one before ten times is beyond all memory."""
    for path in _COMMAND_LINES:
        count = len(subject.texts(path))
        if count > MOST_WORDS:
            yield Found("IEC404", location(path), f"has {count} words; at most {MOST_WORDS} are read")
    for role in Role if subject.disaggregated else (Role.DECODE,):
        replaced = {variable.name for variable in own[role]}
        place = ("metadata", "annotations", f"{PREFIX}{role}-env")
        given = [(at, v.get("name"), v.get("value")) for at, v in subject.objects(OF_ALL)]
        given = [(at, name, value) for at, name, value in given if name not in replaced]
        given += [((*place, i), variable.name, variable.value) for i, variable in enumerate(own[role])]
        sizes: dict[str, int] = {}
        total = 0

        def known(name: str, sizes: Mapping[str, int] = sizes) -> int:
            return sizes.get(name, 0)

        for at, name, value in given:
            if isinstance(name, str) and isinstance(value, str):
                sizes[name] = expanded_size(value, known)
                if sizes[name] >= MOST_TEXT:
                    yield Found("IEC232", (*at, "value"), TOO_LONG)
                    continue
                total += sizes[name]
                if total >= MOST_TEXTS:
                    yield Found("IEC232", (*at, "value"), _TOO_MUCH)
                    return
        total = 0
        for path in ("spec.worker.command", "spec.worker.args", f"{_SPECS[role]}.args"):
            for i, word in enumerate(subject.texts(path)):
                size = expanded_size(word, known)
                if size >= MOST_TEXT:
                    yield Found("IEC404", location(path, i), TOO_LONG)
                    continue
                total += size
                if total >= MOST_TEXTS:
                    yield Found("IEC404", location(path, i), _TOO_MUCH)
                    return


_TOO_MUCH = f"brings them all to {MOST_TEXTS} bytes or more; no program starts with that much"


def _with_words(subject: Subject) -> Subject:
    """The resource with numbers among flags as words: the schema refuses them, and they only lack quotes."""
    copied = Subject(subject.resource)
    for path in _COMMAND_LINES:
        section, _, name = path.rpartition(".")
        if isinstance(words := copied.get(path), list):
            copied.object(section)[name] = [_as_word(word) for word in words]
    return copied


def _as_word(item: Any) -> Any:
    return str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item


def _is_command_line(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(word, str) for word in value))


def readable(subject: Subject) -> Endpoint | None:
    """A valid endpoint with what can be read of a resource's flags and environment, where one is wanted.

    A colocated endpoint gets two roles alike, and annotations mean nothing there. None where there is text
    that is not Unicode.
    """
    variables = [v for _, v in subject.objects(OF_ALL) if isinstance(v.get("name"), str) and v["name"]]
    worker = {
        "image": subject.text("spec.worker.image"),
        "modelInvocationPort": {"containerPort": 8000},
        "modelVolumeMount": {"name": "model"},
        "resources": {},
        "args": subject.texts("spec.worker.args"),
        "command": subject.texts("spec.worker.command"),
        "environmentVariables": [
            {"name": v["name"], "value": v.get("value") if isinstance(v.get("value"), str) else None}
            | ({"valueFrom": v["valueFrom"]} if "valueFrom" in v else {})
            for v in variables
        ],
    }
    pd = {path.rpartition(".")[2]: {"args": subject.texts(f"{path}.args")} for path in _SPECS.values()}
    whole = {
        "apiVersion": f"{GROUP}/v1",
        "kind": KIND,
        "metadata": {"name": "readable", "annotations": subject.annotations if subject.disaggregated else {}},
        "spec": {
            "modelName": subject.text("spec.modelName"),
            "modelSourceConfig": {"modelSourceType": "s3"},
            "worker": worker,
            "pdSpec": pd,
        },
    }
    try:
        return Endpoint.model_validate(whole)
    except ValidationError:
        return None


def _flags(subject: Subject, endpoint: Endpoint, role: Role) -> Flags:
    sources = roles.sources(endpoint, role)
    resources = f"{_SPECS[role]}.resources" if subject.disaggregated else "spec.worker.resources"
    return Flags.of([(s, len(subject.texts(s.path)) - len(s.args)) for s in sources], resources)


def _gpus(subject: Subject, flags: Flags) -> Iterator[Found]:
    """Whether the pod has the GPUs that the engine spreads over."""
    given = gpus(subject.object(flags.resources))
    unusual = (
        "--data-parallel-size-local",
        "--data-parallel-hybrid-lb",
        "--data-parallel-start-rank",
        "--nnodes",
    )
    if not given or any(flags.last(flag) for flag in unusual):
        return
    sizes = {
        f"--{name}-parallel-size": flags.size(f"--{name}-parallel-size")
        for name in ("tensor", "pipeline", "data", "prefill-context")
    }
    needed = 1
    for size in sizes.values():
        needed *= size
    said = (
        " × ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        or "without --tensor-parallel-size"
    )
    last = next((found for flag in sizes if (found := flags.last(flag))), None)
    at = last[1] if last else location(flags.resources)
    if needed > given:
        yield Found(
            "IEC405", at, f"{said}: the engine needs {needed} GPUs, and {flags.resources} has {given}"
        )
    elif needed < given:
        yield Found(
            "IEC709", at, f"{said}: the engine uses {needed} of the {given} GPUs in {flags.resources}"
        )


def _places(subject: Subject, flags: Flags) -> Iterator[Found]:
    """Whether port and model are where the rest of the resource says."""
    port, given = subject.number("spec.worker.modelInvocationPort.containerPort"), flags.last("--port")
    if given and port is not None and flags.number("--port") not in (None, port):
        yield Found(
            "IEC407",
            given[1],
            f"is {given[0]}, but requests go to {port}, worker.modelInvocationPort.containerPort",
        )
    model, mount = (
        roles.model_argument(flags.args),
        subject.text("spec.worker.modelVolumeMount.mountPath", DEFAULT_MOUNT),
    )
    last = flags.last("--model") or flags.last("")
    if model and last and model.startswith("/") and not f"{model}/".startswith(f"{mount.rstrip('/')}/"):
        yield Found("IEC713", last[1], f"names the model {model}, but the weights are mounted at {mount}")
    named = model or any("MODEL" in str(v.get("name")) for _, v in subject.objects(OF_ALL))
    if flags.args and not subject.routed and not named and "vllm" in subject.text("spec.worker.image"):
        said = "name no model, so vLLM takes one of its own: Tandem names it only where there is a router"
        yield Found("IEC725", location("spec.worker.args"), f"{said}. Add --model")


def _taken(subject: Subject, flags: Flags) -> Iterator[Found]:
    """Flags that are replaced, and those that keep others from reaching the engine."""
    for flag in roles.HIDING_FLAGS if subject.routed else ():
        if last := flags.last(flag):
            said = f"{flag}: the router speaks plain HTTP on the engine's port, and finds none; leave it out"
            yield Found("IEC408", last[1], said)
    if subject.disaggregated and (last := flags.last("--kv-transfer-config")):
        yield Found(
            "IEC519",
            last[1],
            "--kv-transfer-config is replaced: Tandem writes it for each role and connector; of one for "
            "NIXL the settings of a single engine stay",
        )
    strategy = subject.text(f"{_ROUTING}.routingStrategy")
    if subject.routed and strategy == "kvaware" and (last := flags.last("--kv-events-config")):
        said = (
            "--kv-events-config: whether and where events are published is replaced; its other settings stay"
        )
        yield Found("IEC519", last[1], said)
    host = flag_value(flags.args, "--host")
    if host in ("127.0.0.1", "localhost", "::1") and (last := flags.last("--host")):
        said = f"--host {host}: probes and other pods reach the engine by the pod's address; use 0.0.0.0"
        yield Found("IEC723", last[1], said)


def _references(subject: Subject, own: Mapping[Role, list[EnvVar]]) -> Iterator[Found]:
    """`$(NAME)` that nothing fills in, and a shell that flags may not get through."""
    shared = {str(v.get("name")) for _, v in subject.objects(OF_ALL)}
    of_role = {role: shared | {v.name for v in own[role]} for role in Role}
    everywhere = of_role[Role.PREFILL] & of_role[Role.DECODE]
    for path in _COMMAND_LINES:
        known = next((of_role[role] for role in Role if path.startswith(_SPECS[role])), everywhere)
        for i, word in enumerate(subject.texts(path)):
            for name in roles.references(word):
                if name not in known:
                    said = f"$({name}) stays as it is: worker.environmentVariables has no such variable"
                    yield Found("IEC720", location(path, i), said)
    command = subject.texts("spec.worker.command")
    if command and command[0].rpartition("/")[2] in ("sh", "bash"):
        yield Found(
            "IEC722",
            location("spec.worker.command"),
            'is a shell: flags reach the engine only if it hands its arguments on ("$@")',
        )


def _caches(subject: Subject, endpoint: Endpoint) -> Iterator[Found]:
    """kvCacheSpec is LMCache's."""
    try:
        connector = choose_connector(endpoint)
    except EngineError:
        return
    file = subject.text(f"{_CACHE}.cacheConfigFile")
    cached = bool(file) or _keeps_kv(subject)
    yield from owned_checks(subject, connector.name, cached=cached)
    if connector.name != "lmcache" or file or not (subject.disaggregated or cached):
        yield from _no_cache_file(subject)
    wanted = subject.get(f"{_CACHE}.enableL1Cache") is True or file
    if connector.name != "lmcache" and (wanted or subject.flag(f"{_CACHE}.enableL2Cache", default=False)):
        yield Found(
            "IEC520",
            location(_CACHE),
            "has no effect, as engines run without LMCache: neither image nor flags nor variables name it",
        )


def _keeps_kv(subject: Subject) -> bool:
    """Whether LMCache has a cache of its own, where no file of the resource's says."""
    store = f"{_CACHE}.l2CacheSpec"
    redis = "redis" in subject.text(f"{store}.l2CacheBackend").lower() and subject.has(
        f"{store}.l2CacheLocalUrl"
    )
    return subject.flag(f"{_CACHE}.enableL1Cache", default=True) or (
        redis and subject.flag(f"{_CACHE}.enableL2Cache", default=False)
    )


def _no_cache_file(subject: Subject) -> Iterator[Found]:
    """Mounts of LMCache's configuration in pods that have none."""
    for at, mount in _mounts(subject):
        if mount.get("name") == "lmcache-config":
            said = "is 'lmcache-config', but there is no such volume: no file is made for LMCache"
            yield Found("IEC223", (*at, "name"), said)


def _mounts(subject: Subject) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Of init containers, and of what annotations add to the roles."""
    for at, container in subject.objects("spec.kubernetes.initContainers"):
        yield from objects_in(container.get("volumeMounts"), (*at, "volumeMounts"))
    extensions, _ = parse_annotations(subject.annotations if subject.disaggregated else {})
    for role, own in extensions.roles.items():
        place = ("metadata", "annotations", f"{PREFIX}{role}-volume-mounts")
        yield from objects_in(list(own.volume_mounts), place)


def _port(subject: Subject, endpoint: Endpoint, of_role: Mapping[Role, Flags]) -> Iterator[Found]:
    """Whether the engine's port is free in its pod."""
    path = "spec.worker.modelInvocationPort.containerPort"
    port = subject.number(path)
    try:
        lmcache = subject.disaggregated and choose_connector(endpoint).name == "lmcache"
    except EngineError:
        return  # the annotation's mistake is told
    taken = taken_ports(
        lmcache=lmcache,
        kv_events=subject.routed and subject.text(f"{_ROUTING}.routingStrategy") == "kvaware",
        tp=max(flags.size("--tensor-parallel-size") for flags in of_role.values()),
        dp=max(flags.size("--data-parallel-size") for flags in of_role.values()),
    )
    if port in taken:
        said = f"is {port}, where the same pod has {taken[port]}; use another, as 8000"
        yield Found("IEC229", location(path), said)


def _caching(subject: Subject, of_role: Mapping[Role, Flags]) -> Iterator[Found]:
    strategy = subject.text(f"{_ROUTING}.routingStrategy", "prefixaware")
    if strategy not in ("kvaware", "prefixaware"):
        return
    chosen = of_role[Role.PREFILL]  # of a colocated endpoint both are alike
    last = chosen.last("--enable-prefix-caching")
    if last and switch(chosen.args, "--enable-prefix-caching") is False:
        yield Found(
            "IEC708",
            last[1],
            f"{last[0]}: the strategy {strategy} has nothing to choose by without a prefix cache",
        )
    for flags in of_role.values():
        ranks, place = flags.size("--data-parallel-size"), flags.last("--data-parallel-size")
        if strategy == "kvaware" and ranks > MOST_RANKS and place:
            yield Found(
                "IEC404",
                place[1],
                f"is {place[0]}; with the strategy kvaware a pod has at most {MOST_RANKS} ranks",
            )
