"""What can go wrong between us and an API server."""

from __future__ import annotations

from typing import Any


class KubeError(Exception):
    """The API server could not be reached, or gave no answer that can be read."""


class NoCluster(KubeError):
    """There is no configuration that names a cluster."""


class ApiError(KubeError):
    """An answer other than success."""

    def __init__(self, status: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status."""
        self.reason = reason
        """Kubernetes' word for it: NotFound, Conflict, Invalid, Forbidden, Expired …"""
        self.message = message
        self.details = details or {}

    @property
    def gone(self) -> bool:
        """A watch or a page from a resource version that the server no longer has."""
        return self.status == 410

    @property
    def missing(self) -> bool:
        return self.status == 404

    @property
    def conflict(self) -> bool:
        return self.status == 409

    @property
    def final(self) -> bool:
        """The same request would be refused again: it is invalid, or we may not send it."""
        return self.status in (400, 403, 405, 413, 415, 422)

    @property
    def terminating(self) -> bool:
        """Nothing can be made in the namespace any more: it is being deleted."""
        causes = self.details.get("causes") or ()
        return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)

    @property
    def busy(self) -> bool:
        """The API server is overloaded, on its way down or up: any other request would fare no better."""
        return self.status in (429, 503, 504)
