"""Models of `InferenceEndpointConfig`: the parts that code reads, under the CRD's own names.

`load.read_endpoint` makes them of what the API server takes; what it refuses is told there, in the schema's
words. Sections that code reads by name only are kept as they came (`Any`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tandem.api.conventions import DEFAULT_MOUNT

GROUP = "inference.sagemaker.aws.amazon.com"
KIND = "InferenceEndpointConfig"
VERSIONS = ("v1", "v1alpha1")

ANNOTATION_CONNECTOR = "tandem.dev/connector"
"""Overrides the KV connector that would be chosen: `auto` (default), `nixl` or `lmcache`."""

Int32 = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Flag = Annotated[bool, Field(strict=True)]


class Role(StrEnum):
    """A pool of engines of a disaggregated endpoint."""

    PREFILL = "prefill"
    DECODE = "decode"


class Section(BaseModel):
    """An object of the resource: camelCase on the wire, unknown names refused, immutable."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)


class RoleSpec(Section):
    """`pdSpec.prefillSpec` and `pdSpec.decodingSpec`."""

    replicas: Annotated[Int32, Field(ge=1)] = 1
    args: tuple[str, ...] = ()
    node_selector: dict[str, str] | None = None
    resources: dict[str, Any] | None = None


class TopologySpec(Section):
    same_az: Flag = Field(default=True, alias="sameAZ")
    availability_zone: str | None = None
    placement_group: str | None = None


class PdSpec(Section):
    """`spec.pdSpec`: its presence makes the endpoint disaggregated."""

    prefill_spec: RoleSpec
    decoding_spec: RoleSpec
    routing_threshold: Annotated[Int32, Field(ge=0)] = 4096
    """Prompt tokens from which a request goes through a prefiller; 0 = always."""
    topology_spec: TopologySpec | None = None
    auto_scaling_spec: Any = None

    def role(self, role: Role) -> RoleSpec:
        return self.prefill_spec if role is Role.PREFILL else self.decoding_spec


class IntelligentRoutingSpec(Section):
    enabled: Flag = False
    routing_strategy: Literal["prefixaware", "kvaware", "session", "roundrobin"] = "prefixaware"
    auto_scaling_spec: Any = None


class ModelSource(Section):
    """`spec.modelSourceConfig`."""

    model_source_type: Literal["fsx", "s3", "huggingface", "kubernetesVolume"]
    model_location: str | None = None
    prefetch_enabled: Flag = False
    s3_storage: Any = Field(default=None, alias="s3Storage")
    fsx_storage: Any = None
    hugging_face_model: Any = None


class HostPath(Section):
    path: str
    type: str | None = None


class Volume(BaseModel):
    """A core/v1 Volume; only what a local endpoint can mount is read, the other kinds are kept."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow", frozen=True)

    name: str
    host_path: HostPath | None = None


class KubernetesSpec(Section):
    volumes: tuple[Volume, ...] = ()
    init_containers: Any = None
    scheduler_name: str | None = None
    service_account_name: str | None = None


class InvocationPort(Section):
    container_port: Port
    name: Literal["http", "grpc"] = "http"


class ModelVolumeMount(Section):
    name: str
    mount_path: str = DEFAULT_MOUNT


class EnvVar(Section):
    name: str
    value: str | None = None
    value_from: Any = None


class RequestLimits(Section):
    """`spec.worker.requestLimits`: what one model pod takes at once; no limit without
    `maxConcurrentRequests`."""

    max_concurrent_requests: Annotated[Int32, Field(ge=1)] | None = None
    max_queue_size: Annotated[Int32, Field(ge=0)] | None = None
    """Requests that may wait beyond those, for at most 60 seconds."""
    overflow_status_code: Annotated[Int32, Field(ge=400, le=599)] = 429
    """The HTTP status that the rest are answered with."""


class Worker(Section):
    """`spec.worker`: what both roles share."""

    image: str
    model_invocation_port: InvocationPort
    model_volume_mount: ModelVolumeMount
    resources: Any
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    working_dir: str | None = None
    environment_variables: tuple[EnvVar, ...] = ()
    probes: Any = None
    request_limits: RequestLimits | None = None


class Spec(Section):
    model_name: str
    model_source_config: ModelSource
    worker: Worker
    pd_spec: PdSpec | None = None
    intelligent_routing_spec: IntelligentRoutingSpec | None = None
    kubernetes: KubernetesSpec | None = None
    invocation_endpoint: str = "invocations"

    # Kept as they came: what is read of them is read by name.
    initial_replica_count: Any = Field(default=None, alias="InitialReplicaCount")
    auto_scaling_spec: Any = None
    data_capture: Any = None
    dns_config: Any = None
    endpoint_name: Any = None
    inference_gateway: Any = None
    instance_type: Any = None
    instance_types: Any = None
    kv_cache_spec: Any = None
    load_balancer: Any = None
    max_deploy_time_in_seconds: Any = None
    metrics: Any = None
    metrics_collector_resources: Any = None
    metrics_sidecar_resources: Any = None
    model_cache_config: Any = None
    model_version: Any = None
    node_affinity: Any = None
    replicas: Any = None
    s3_uploader_resources: Any = Field(default=None, alias="s3UploaderResources")
    tags: Any = None
    tls_config: Any = None

    @property
    def invocation_path(self) -> str:
        """`invocationEndpoint` with its one leading slash."""
        return "/" + self.invocation_endpoint.strip("/")


class Metadata(BaseModel):
    """The part of ObjectMeta that is read."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    """Where the API server is to make the name: what it begins with."""
    namespace: str = "default"
    annotations: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What is empty is left out, and a name that is to be made is known by its beginning."""
        said = {key: value for key, value in given.items() if value != ""}
        begun = str(said.get("generateName", "")).rstrip("-.")
        return {"name": begun or "endpoint"} | said


class Endpoint(Section):
    """One `InferenceEndpointConfig`."""

    api_version: str
    kind: Literal["InferenceEndpointConfig"]
    metadata: Metadata
    spec: Spec
    status: Any = None
