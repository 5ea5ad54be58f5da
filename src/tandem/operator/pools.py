"""The pools of an endpoint: one for each role, or the one of a colocated endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.api import Endpoint, PdSpec, Role, RoleSpec
from tandem.api.annotations import Extensions, RoleExtensions
from tandem.api.models import EnvVar
from tandem.api.quantities import EFA, GPU, devices
from tandem.engine import EngineError, int_flag, merge_args, role_args
from tandem.engine.roles import with_variables
from tandem.operator.errors import RenderError
from tandem.operator.wishes import AutoScaling, autoscaling, section


@dataclass(frozen=True)
class Flags:
    """What a pool's vLLM flags say that others have to know."""

    context: int | None
    """`--max-model-len` in tokens."""
    tp: int
    pp: int
    dp: int
    block_size: int
    step_tokens: int | None
    """`--max-num-batched-tokens`."""

    @property
    def ranks(self) -> int:
        """Processes, each with a GPU."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Pool:
    """Pods that are all alike."""

    role: Role | None
    """None: a colocated endpoint's workers."""
    replicas: int
    given_args: tuple[str, ...]
    """Flags as the resource has them, `$(NAME)` and all, for Kubernetes to fill in."""
    args: tuple[str, ...]
    """The same with references to literal variables filled in, and those of a command: to read from."""
    flags: Flags
    env: tuple[EnvVar, ...]
    image: str
    resources: Mapping[str, Any]
    node_selector: Mapping[str, str]
    extensions: RoleExtensions
    gpus: int
    """GPUs of one pod."""
    efa: int | None
    """EFA interfaces that the resource asks for; None: it does not say."""
    scaling: AutoScaling | None

    @property
    def component(self) -> str:
        return "worker" if self.role is None else self.role.value

    def env_value(self, name: str) -> str | None:
        """A variable's literal value; RenderError where it comes from elsewhere."""
        for variable in self.env:
            if variable.name == name:
                if variable.value_from is not None:
                    raise RenderError(
                        f"spec.worker.environmentVariables[{name}]: must have a value of its own, as sizes "
                        "are computed with it"
                    )
                return variable.value
        return None


def pools(endpoint: Endpoint, extensions: Extensions) -> tuple[Pool, ...]:
    """Prefillers first. Raises RenderError for flags that cannot be read."""
    spec = endpoint.spec
    if spec.pd_spec is None:
        scaling = autoscaling(spec.auto_scaling_spec, "spec.autoScalingSpec")
        replicas = 1 if spec.replicas is None else int(spec.replicas)
        workers = RoleSpec.model_construct(
            replicas=replicas, args=(), node_selector=None, resources=section(spec.worker.resources)
        )
        return (_pool(endpoint, None, workers, RoleExtensions(), scaling),)
    wishes = section(spec.pd_spec.auto_scaling_spec)
    names = {Role.PREFILL: "prefillAutoScaling", Role.DECODE: "decodingAutoScaling"}
    return tuple(
        _pool(
            endpoint,
            role,
            spec.pd_spec.role(role),
            extensions.roles[role],
            autoscaling(wishes.get(names[role]), f"spec.pdSpec.autoScalingSpec.{names[role]}"),
        )
        for role in Role
    )


def disaggregated(endpoint: Endpoint) -> Endpoint:
    """A colocated endpoint as if it had roles without settings of their own: what reads flags asks for
    roles. Annotations about hand-offs mean nothing there."""
    if endpoint.spec.pd_spec is not None:
        return endpoint
    roles = PdSpec(prefillSpec=RoleSpec(), decodingSpec=RoleSpec())  # type: ignore[call-arg]
    spec = endpoint.spec.model_copy(update={"pd_spec": roles})
    metadata = endpoint.metadata.model_copy(update={"annotations": {}})
    return endpoint.model_copy(update={"spec": spec, "metadata": metadata})


def _pool(
    endpoint: Endpoint,
    role: Role | None,
    given: RoleSpec,
    extensions: RoleExtensions,
    scaling: AutoScaling | None,
) -> Pool:
    worker = endpoint.spec.worker
    own = [EnvVar.model_validate(variable) for variable in extensions.env]
    seen = with_variables(disaggregated(endpoint), own)
    args = tuple(role_args(seen, role or Role.DECODE))
    resources = section(given.resources)
    return Pool(
        role=role,
        replicas=given.replicas,
        given_args=tuple(merge_args(worker.args, given.args)),
        args=args,
        flags=_flags(args),
        env=seen.spec.worker.environment_variables,
        image=extensions.image or worker.image,
        resources=resources,
        node_selector=given.node_selector or {},
        extensions=extensions,
        gpus=_devices(resources, GPU, role) or 0,
        efa=_devices(resources, EFA, role),
        scaling=scaling,
    )


_RESOURCES = {
    None: "spec.worker.resources",
    Role.PREFILL: "spec.pdSpec.prefillSpec.resources",
    Role.DECODE: "spec.pdSpec.decodingSpec.resources",
}


def _devices(resources: Mapping[str, Any], name: str, role: Role | None) -> int | None:
    try:
        return devices(resources, name)
    except ValueError as error:
        raise RenderError(f"{_RESOURCES[role]}.{error}") from None


def _flags(args: tuple[str, ...]) -> Flags:
    try:
        return Flags(
            context=int_flag(args, "--max-model-len"),
            tp=int_flag(args, "--tensor-parallel-size") or 1,
            pp=int_flag(args, "--pipeline-parallel-size") or 1,
            dp=int_flag(args, "--data-parallel-size") or 1,
            block_size=int_flag(args, "--block-size") or 16,
            step_tokens=int_flag(args, "--max-num-batched-tokens"),
        )
    except EngineError as error:
        raise RenderError(str(error)) from None
