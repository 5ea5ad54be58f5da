"""Which path of the API a kind of object has."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from tandem.kube.objects import Object


@dataclass(frozen=True)
class Resource:
    group: str
    """"" for the core group."""
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def definition(self) -> str:
        """The name of its CustomResourceDefinition, if it has one."""
        return f"{self.plural}.{self.group}"

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """Of one object, or without a name of all; without a namespace, those of all namespaces."""
        words = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace and self.namespaced:
            words += ["namespaces", quote(namespace, safe="")]
        words.append(self.plural)
        if name is not None:
            words.append(quote(name, safe=""))
        if subresource is not None:
            words.append(subresource)
        return "/" + "/".join(words)


CONFIG_MAP = Resource("", "v1", "ConfigMap", "configmaps")
EVENT = Resource("", "v1", "Event", "events")
NAMESPACE = Resource("", "v1", "Namespace", "namespaces", namespaced=False)
VOLUME = Resource("", "v1", "PersistentVolume", "persistentvolumes", namespaced=False)
CLAIM = Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
POD = Resource("", "v1", "Pod", "pods")
SECRET = Resource("", "v1", "Secret", "secrets")
SERVICE = Resource("", "v1", "Service", "services")
SERVICE_ACCOUNT = Resource("", "v1", "ServiceAccount", "serviceaccounts")
VALIDATING_WEBHOOK = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    namespaced=False,
)
CSI_DRIVER = Resource("storage.k8s.io", "v1", "CSIDriver", "csidrivers", namespaced=False)
DEFINITION = Resource(
    "apiextensions.k8s.io",
    "v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)
DEPLOYMENT = Resource("apps", "v1", "Deployment", "deployments")
LEASE = Resource("coordination.k8s.io", "v1", "Lease", "leases")
SCALED_OBJECT = Resource("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects")
TRIGGER_AUTHENTICATION = Resource("keda.sh", "v1alpha1", "TriggerAuthentication", "triggerauthentications")
INGRESS = Resource("networking.k8s.io", "v1", "Ingress", "ingresses")
NETWORK_POLICY = Resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
BUDGET = Resource("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
ROLE = Resource("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")

_KNOWN = {
    (resource.api_version, resource.kind): resource
    for resource in list(globals().values())
    if isinstance(resource, Resource)
}


def resource_of(found: Object) -> Resource:
    """Raises KeyError for a kind that is not listed here."""
    return _KNOWN[found["apiVersion"], found["kind"]]
