"""NIXL agents of engines that share a few CPU cores: how fast they poll, and where their engine computes.

Imported by the connectors inside vLLM; vLLM's logger is the only thing of it that is used here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm.logger import init_logger

PROGRESS_DELAY_VARIABLE = "TANDEM_NIXL_PROGRESS_DELAY_US"
DEFAULT_PROGRESS_DELAY_US = 1000
MAX_PROGRESS_DELAY_US = 1_000_000

# vLLM's logging configuration shows only loggers below `vllm`.
logger = init_logger("vllm.tandem.nixl_agents")


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
            "The connector needs NIXL beside vLLM, and it cannot be imported "
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
