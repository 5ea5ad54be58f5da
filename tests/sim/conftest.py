"""vLLM's parser, which other packages of tests make."""

from __future__ import annotations

from ..engine.conftest import vllm_parser

__all__ = ["vllm_parser"]
