"""What the resource's schema does not say, and both validation and the operator hold to."""

from __future__ import annotations

import re
from collections.abc import Mapping

MOST_ANNOTATION_BYTES = 256 << 10
"""What the annotations of one object may take, names and values together."""

RESERVED_VOLUMES = (
    "shm",
    "model-weights-copy",
    "parallel-copy-configmap",
    "lmcache-config",
    "gated-model-downloader-configmap",
    "tandem-config",
    "tandem-proxy-tmp",
    "tandem-scripts",
    "tandem-tmp",
)
"""Names of volumes that cannot be chosen: HyperPod's own, and those that Tandem adds to model pods."""

MOST_ROUTERS = 100
"""Of one endpoint. They run in the system namespace, where no quota of the endpoint's own bounds them."""

DEFAULT_MOUNT = "/opt/ml/model"
"""Where weights are mounted when the resource does not say."""

PROXY_CONTAINER = "sidecar-reverse-proxy"
COLLECTOR_CONTAINER = "otel-collector"
DOWNLOAD_CONTAINER = "hf-model-downloader"
COPY_CONTAINER = "model-weights-copier"

SHM_FOLDER = "/dev/shm"
TMP_FOLDER = "/tmp"
SCRIPTS_FOLDER = "/opt/tandem"
LMCACHE_FOLDER = "/etc/tandem/lmcache"
"""Where Tandem mounts its own volumes in the model container. The last two are read-only: nothing can be
mounted below them."""

LONGEST_PATH = 1000
"""Characters. nginx takes no word of 4,096, and a load balancer no path of more than 1,024."""
_PLAIN_PATH = re.compile(r"(?!.*(?://|/\.\.?(?:/|$)))/[A-Za-z0-9._~/-]*")


def annotation_bytes(annotations: Mapping[str, object]) -> int:
    return sum(len(f"{name}{text}".encode(errors="replace")) for name, text in annotations.items())


def clash(folder: str) -> str | None:
    """The folder of Tandem's beside which nothing can be mounted at `folder`; None where it can."""
    path = f"{folder.rstrip('/')}/"
    for ours in (SHM_FOLDER, TMP_FOLDER, SCRIPTS_FOLDER, LMCACHE_FOLDER):
        below = path.startswith(f"{ours}/") and ours in (SCRIPTS_FOLDER, LMCACHE_FOLDER)
        if below or f"{ours}/".startswith(path):
            return ours
    return None


def is_plain_path(path: str) -> bool:
    """Whether a path can stand in configurations as it is, and in an Ingress, which takes no `//`, `/../`."""
    return len(path) <= LONGEST_PATH and _PLAIN_PATH.fullmatch(path) is not None


PLAIN_PATH = (
    f"a plain path, of at most {LONGEST_PATH:,} letters, digits and . _ ~ - /, without // and parts that are "
    ". or .."
)
"""What such a path is, in words."""
