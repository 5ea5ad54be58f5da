"""The status tells over what KV goes, from what the engines log."""

from __future__ import annotations

from pathlib import Path

from .endpoint import manifest
from .kube import Cluster
from .operating import Managed, Operator, managed


def test_the_transport_is_in_the_status(cluster: Cluster, operator: Operator, model: Path) -> None:
    resource = manifest("nixl", "transport", model)
    resource["spec"]["metrics"]["enabled"] = False
    with managed(cluster, resource, model) as endpoint:
        cluster.wait_for("the endpoint", endpoint.complete, 120)

        def told(endpoint: Managed = endpoint) -> bool:
            return str(endpoint.status().get("transfer", {}).get("transport")) == "TCP (tcp/eth0)"

        cluster.wait_for("the transport", told, 60)
