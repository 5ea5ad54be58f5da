"""A Kubernetes API server as its clients see it: requests on plain objects, and stores kept by watches.

Knows nothing of endpoints, engines or routing. Objects are dicts, as JSON gives them: what a library's typed
models do not know would be lost on the way back.
"""

from tandem.kube.client import Client, connect
from tandem.kube.errors import ApiError, KubeError, NoCluster
from tandem.kube.objects import Key, Object, key_of
from tandem.kube.reflector import Reflector
from tandem.kube.resources import Resource, resource_of

__all__ = [
    "ApiError",
    "Client",
    "Key",
    "KubeError",
    "NoCluster",
    "Object",
    "Reflector",
    "Resource",
    "connect",
    "key_of",
    "resource_of",
]
