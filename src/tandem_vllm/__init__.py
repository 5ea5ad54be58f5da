"""A vLLM plugin without dependencies: KV connectors fit for CPU engines that share a machine.

vLLM calls `register` in every process of an engine (entry point group `vllm.general_plugins`).
"""

from __future__ import annotations

import logging

CONNECTORS = {"CpuNixlConnector": "tandem_vllm.cpu_nixl", "CpuLMCacheConnector": "tandem_vllm.cpu_lmcache"}

# vLLM's logging configuration shows only loggers below `vllm`.
_logger = logging.getLogger("vllm.tandem")


def register() -> None:
    """Make the connectors known to vLLM by name. Where that fails the log says why and the engine goes on."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name, module in CONNECTORS.items():
            if name not in KVConnectorFactory._registry:  # vLLM may call this twice in a process
                KVConnectorFactory.register_connector(name, module, name)
    except Exception as error:
        _logger.info("%s are not available with this vLLM: %r", ", ".join(CONNECTORS), error)
