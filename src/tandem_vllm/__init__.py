"""A vLLM plugin without dependencies: a NIXL connector fit for CPU engines that share a machine.

vLLM calls `register` in every process of an engine (entry point group `vllm.general_plugins`).
"""

from __future__ import annotations

import logging

CONNECTOR = "CpuNixlConnector"

# vLLM's logging configuration shows only loggers below `vllm`.
_logger = logging.getLogger("vllm.tandem")


def register() -> None:
    """Make the connector known to vLLM by name. Where that fails, the log says why and the engine goes on."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:  # vLLM may call this twice in a process
            KVConnectorFactory.register_connector(CONNECTOR, "tandem_vllm.cpu_nixl", CONNECTOR)
    except Exception as error:
        _logger.info("%s is not available with this vLLM: %r", CONNECTOR, error)
