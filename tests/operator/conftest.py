"""The API server and vLLM's parser, which other packages of tests start."""

from __future__ import annotations

from ..api.conftest import api_server, bare_api_server, namespace
from ..engine.conftest import vllm_parse, vllm_parser

__all__ = ["api_server", "bare_api_server", "namespace", "vllm_parse", "vllm_parser"]
