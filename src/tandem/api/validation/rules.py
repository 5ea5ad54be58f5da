"""Every rule of validation: its id, how bad it is to break it, and what it is about.

Ids are for people to search for and for tools to filter by; one is never given to another rule. The first
digit says the kind. Errors: 0 the file, 1 the schema, 2 fields together, 3 annotations, 4 flags of the
engines. Warnings: 5 without effect, 6 otherwise on HyperPod, 7 probably not meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Literal["error", "warning"]
    title: str
    """One line, for lists of rules."""
    api_server: bool = False
    """Whether the API server refuses it too, by the CustomResourceDefinition or by itself."""


_ERRORS = {
    # The file.
    "IEC001": "The file is not YAML or JSON that Kubernetes reads",
    "IEC002": "A key is given twice",
    "IEC003": "There is no InferenceEndpointConfig",
    "IEC004": "The kind is misspelt",
    # The schema.
    "IEC101": "The field does not exist",
    "IEC102": "A required field is missing",
    "IEC103": "The value has the wrong type",
    "IEC104": "The value is outside of what the field allows",
    "IEC105": "An item of a list stands twice",
    "IEC106": "The apiVersion is not served",
    "IEC107": "Metadata breaks a rule of Kubernetes",
    # Fields together.
    "IEC201": "modelSourceType s3 needs s3Storage",
    "IEC202": "modelSourceType fsx needs fsxStorage",
    "IEC203": "modelSourceType huggingface needs huggingFaceModel",
    "IEC204": "modelSourceType kubernetesVolume excludes modelLocation",
    "IEC205": "modelSourceType kubernetesVolume needs kubernetes.volumes",
    "IEC206": "The volume's name is taken",
    "IEC207": "instanceType and instanceTypes exclude each other",
    "IEC208": "inferenceGateway and intelligentRoutingSpec cannot both be enabled",
    "IEC209": "minReplicaCount is greater than maxReplicaCount",
    "IEC221": "No volume has the name of worker.modelVolumeMount",
    "IEC222": "A name of a pod's volume or container is given twice",
    "IEC223": "A mount names no volume",
    "IEC224": "A volume has several sources",
    "IEC225": "The name cannot be that of a volume or container",
    "IEC226": "Amounts of a resource that Kubernetes refuses",
    "IEC227": "A probe that Kubernetes refuses",
    "IEC228": "An environment variable has no source, or several",
    "IEC229": "The engine's port is taken in its pod",
    "IEC230": "A field that is needed is empty",
    "IEC231": "A CloudWatch trigger without its metric or target",
    "IEC232": "An environment variable's value stops the engine",
    "IEC233": "The value cannot work",
    "IEC234": "The weights' volume has a name that is taken",
    "IEC235": "A path that is not plain",
    "IEC236": "A volume has the name of the one that is made for the weights",
    "IEC237": "A PD buffer smaller than one chunk of KV",
    # Annotations.
    "IEC301": "A mistake in an annotation of Tandem's",
    "IEC302": "API keys where there is no router",
    # The engines' flags.
    "IEC401": "A flag's value is none that vLLM takes",
    "IEC402": "A flag has no value",
    "IEC403": "Flag and value stand in one item",
    "IEC404": "The flags do not go together",
    "IEC405": "The engine needs more GPUs than its pod has",
    "IEC406": "Prefillers and decoders cannot work together",
    "IEC407": "--port is not the port of modelInvocationPort",
    "IEC408": "A flag that hides the engine from the router",
    "IEC409": "A mode in which LMCache hands over garbage or hangs",
}

_WARNINGS = {
    # Without effect.
    "IEC501": "worker.resources under pdSpec",
    "IEC502": "replicas under pdSpec",
    "IEC503": "autoScalingSpec under pdSpec",
    "IEC504": "intelligentRoutingSpec.enabled: false under pdSpec",
    "IEC505": "Settings of a router where there is none",
    "IEC506": "A trigger beside a list of triggers: the list wins",
    "IEC507": "An L2 cache without a backend",
    "IEC508": "Settings of an L2 cache that is not used",
    "IEC509": "Cache settings beside cacheConfigFile",
    "IEC510": "requestLimits without maxConcurrentRequests",
    "IEC511": "Settings of another source of weights",
    "IEC512": "A token for Hugging Face that no download uses",
    "IEC513": "A field that Tandem accepts and does not act on",
    "IEC514": "Settings of metrics that are not enabled",
    "IEC515": "Settings of a cache of weights that is not used",
    "IEC516": "Annotations about disaggregation without pdSpec",
    "IEC517": "The endpoint is not managed",
    "IEC518": "PD_BUFFER_SIZE where no engine has such a buffer",
    "IEC519": "A flag that Tandem sets itself",
    "IEC520": "kvCacheSpec where LMCache is not",
    "IEC521": "A variable that Tandem sets itself",
    # Otherwise on HyperPod.
    "IEC601": "Several decoders",
    "IEC602": "An instance type that HyperPod does not disaggregate on",
    "IEC603": "kvaware for other paths than v1/completions",
    "IEC604": "nodeAffinity beside instance types",
    "IEC605": "Neither instance types nor nodeAffinity",
    "IEC606": "dnsConfig without a certificate of one's own",
    "IEC607": "requestLimits without metrics",
    "IEC608": "A name that no Service can have",
    # Probably not meant.
    "IEC701": "replicas outside the bounds of autoscaling",
    "IEC702": "A trigger that scales nothing",
    "IEC703": "A trigger that looks back for less than one data point",
    "IEC704": "maxReplicaCount is 0",
    "IEC705": "A role without a GPU",
    "IEC706": "routingThreshold above max-model-len",
    "IEC707": "A PD buffer smaller than one prompt",
    "IEC708": "The strategy chooses by a prefix cache that is off",
    "IEC709": "The engine needs fewer GPUs than its pod has",
    "IEC710": "maxDeployTimeInSeconds leaves no time",
    "IEC711": "modelMetrics.port is not the port of modelInvocationPort",
    "IEC712": "invocationEndpoint is the root",
    "IEC713": "The model's folder is not on the mounted volume",
    "IEC714": "The volume of the model is empty",
    "IEC715": "Autoscaling without a trigger",
    "IEC716": "An instance type that no node has",
    "IEC717": "An unknown L2 backend",
    "IEC718": "A port named grpc",
    "IEC719": "Several routers with LMCache",
    "IEC720": "A reference $(NAME) to no variable",
    "IEC721": "Prefillers and decoders differ in what slows or limits the hand-off",
    "IEC722": "A shell as the command",
    "IEC723": "The engine listens on its own pod's loopback address",
    "IEC724": "The AWS region is needed, which the resource does not name",
    "IEC725": "No flag names the model",
    "IEC726": "More routers than an endpoint can have",
}

_BY_API_SERVER = (
    {"IEC001", "IEC004"} | {f"IEC10{i}" for i in range(1, 8)} | {f"IEC20{i}" for i in range(1, 10)}
)

RULES: dict[str, Rule] = {
    **{i: Rule(i, "error", title, i in _BY_API_SERVER) for i, title in _ERRORS.items()},
    **{i: Rule(i, "warning", title) for i, title in _WARNINGS.items()},
}
