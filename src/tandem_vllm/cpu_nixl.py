"""`CpuNixlConnector`: vLLM's NIXL pull connector, made fit for engines that share a few CPU cores.

Two things that vLLM 0.32 with NIXL 1.5 does are ruinous there and are undone here:

- the connector pins the thread that creates it, which is the engine's compute thread, to the last core of
  each NUMA node. Every engine of the machine then computes there. The affinity from before is restored.
- NIXL's progress thread polls without a pause, a whole core for each engine even when idle. Here it pauses
  for TANDEM_NIXL_PROGRESS_DELAY_US between polls. It must not be turned off: reads from an idle peer hang.

Imported by vLLM only when an engine asks for the connector.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm.logger import init_logger

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
except ImportError as error:
    raise ImportError(
        "CpuNixlConnector needs a vLLM that has NixlPullConnector "
        "(vllm.distributed.kv_transfer.kv_connector.v1.nixl); it was made for vLLM 0.32. "
        "Install the pinned CPU build, or use the connector NixlConnector instead."
    ) from error

PROGRESS_DELAY_VARIABLE = "TANDEM_NIXL_PROGRESS_DELAY_US"
DEFAULT_PROGRESS_DELAY_US = 1000
MAX_PROGRESS_DELAY_US = 1_000_000

# vLLM's logging configuration shows only loggers below `vllm`.
logger = init_logger("vllm.tandem.cpu_nixl")


class CpuNixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The stock pull connector in every respect but CPU affinity and the pace of NIXL's progress thread."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        delay_us = progress_delay_us(os.environ)
        api = nixl_api()
        with kept_affinity(), paced_progress(api, delay_us):
            super().__init__(vllm_config, role, kv_cache_config)


def progress_delay_us(environ: Mapping[str, str]) -> int:
    """Microseconds between two polls of NIXL's progress thread; 0 polls without a pause.

    Raises ValueError when the variable is not a whole number from 0 to MAX_PROGRESS_DELAY_US.
    """
    text = environ.get(PROGRESS_DELAY_VARIABLE, str(DEFAULT_PROGRESS_DELAY_US))
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PROGRESS_DELAY_US:
        raise ValueError(
            f"{PROGRESS_DELAY_VARIABLE} is {text!r}; it must be a whole number of microseconds "
            f"from 0 to {MAX_PROGRESS_DELAY_US}"
        )
    return int(text)


def nixl_api() -> ModuleType:
    """NIXL's Python API. Raises ImportError, in words, when NIXL is not installed beside vLLM."""
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ImportError(
            "CpuNixlConnector needs NIXL beside vLLM, and it cannot be imported "
            f"({error}). Install the packages nixl and nixl-cu12 (no GPU is needed for them)."
        ) from error


@contextmanager
def kept_affinity() -> Iterator[None]:
    """The calling thread runs on the same CPUs after the block as before it, whatever the block does."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        changed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, before)
        if changed != before:
            logger.info("CPU affinity %s restored; the connector had set %s", sorted(before), sorted(changed))


@contextmanager
def paced_progress(api: ModuleType, delay_us: int) -> Iterator[None]:
    """NIXL agents created inside the block pause for `delay_us` between two polls of their progress thread.

    `nixl_agent` writes a delay of 0 into its native configuration and offers no other way; so, inside the
    block, that configuration is a subclass which keeps the delay. Where NIXL is made differently, a warning
    says so.
    """
    bindings: Any = getattr(api, "nixlBind", None)
    native: Any = getattr(bindings, "nixlAgentConfig", None)
    if native is None or not hasattr(native, "pthrDelay"):
        logger.warning("This NIXL has no delay for its progress thread: it may use a whole core")
        yield
        return

    class Paced(native):  # type: ignore[misc]  # a native class, known at run time only
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Paced
    try:
        yield
    finally:
        bindings.nixlAgentConfig = native
