"""The status tells over what KV goes, from what the engines log."""

from __future__ import annotations

from pathlib import Path

from .kube import Cluster
from .operating import Managed, Operator, nixl_pair


def test_the_transport_is_in_the_status(cluster: Cluster, operator: Operator, model: Path) -> None:
    with nixl_pair(cluster, "transport", model, metrics=False) as endpoint:

        def told(endpoint: Managed = endpoint) -> bool:
            return str(endpoint.status().get("transfer", {}).get("transport")) == "TCP (tcp/eth0)"

        cluster.wait_for("the transport", told, 60)
