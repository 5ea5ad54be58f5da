"""What the resource's schema does not say, and both validation and the operator hold to."""

from __future__ import annotations

import re

RESERVED_VOLUMES = (
    "shm",
    "model-weights-copy",
    "parallel-copy-configmap",
    "lmcache-config",
    "gated-model-downloader-configmap",
)
"""Names of volumes that Tandem, as HyperPod, adds to model pods itself."""

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._~/-]*")


def is_plain_path(path: str) -> bool:
    """Whether a path can stand in configurations as it is."""
    return _PLAIN_PATH.fullmatch(path) is not None


PLAIN_PATH = "a plain path, of letters, digits and . _ ~ - /"
"""What such a path is, in words."""
