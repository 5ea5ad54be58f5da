"""`CpuNixlConnector`: vLLM's NIXL pull connector, made fit for engines that share a few CPU cores.

Two things that vLLM 0.32 with NIXL 1.5 does are ruinous there and are undone here:

- the connector pins the thread that creates it, which is the engine's compute thread, to the last core of
  each NUMA node. Every engine of the machine then computes there. The affinity from before is restored.
- NIXL's progress thread polls without a pause, a whole core for each engine even when idle. Here it pauses
  for TANDEM_NIXL_PROGRESS_DELAY_US between polls. It must not be turned off: reads from an idle peer hang.

Imported by vLLM only when an engine asks for the connector.
"""

from __future__ import annotations

import os
from typing import Any

from tandem_vllm.nixl_agents import kept_affinity, nixl_api, paced_progress, progress_delay_us

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
except ImportError as error:
    raise ImportError(
        "CpuNixlConnector needs a vLLM that has NixlPullConnector "
        "(vllm.distributed.kv_transfer.kv_connector.v1.nixl); it was made for vLLM 0.32. "
        "Install the pinned CPU build, or use the connector NixlConnector instead."
    ) from error


class CpuNixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The stock pull connector in every respect but CPU affinity and the pace of NIXL's progress thread."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        delay_us = progress_delay_us(os.environ)
        api = nixl_api()
        with kept_affinity(), paced_progress(api, delay_us):
            super().__init__(vllm_config, role, kv_cache_config)
