"""Engines that run already, started by somebody else: what each tells of itself, and whether it can be used.

What cannot be told here the router's canaries find out. One thing they cannot: a decoder without a KV
connector answers them, as vLLM then computes the prompt itself, with no more than a line in its log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.api import Role
from tandem.config import EngineSpec, engine_spec
from tandem.engine import ConnectorChoice, kv_transfer_config
from tandem.local.errors import LocalError

_TIMEOUT = httpx.Timeout(30.0, connect=3.0)  # one that is deep in a prefill may not answer for a while
_WHOLE_SECONDS = 60.0
_MOST_BYTES = 32 << 20

# Shown by vLLM's NixlConnector (alone or under a MultiConnector), and by engines whose kv_role takes KV.
_NIXL, _TAKES_KV = "vllm:nixl_", "vllm:num_requests_kv_fetch_by_stage"


@dataclass(frozen=True)
class AttachedEngine:
    """An engine as it tells of itself."""

    role: Role
    spec: EngineSpec
    models: tuple[str, ...]
    """Names that it serves, the first of which is its own; adapters are not among them."""
    block_size: int | None
    """Tokens of a KV block."""
    takes_kv: bool
    """Whether its kv_role is one that takes KV (kv_consumer, kv_both), as far as its metrics say so."""

    @property
    def named(self) -> str:
        """As the command line has it."""
        return f"--{self.role.value}-url {self.spec.url}"


def look_at(given: Sequence[tuple[Role, str]]) -> tuple[AttachedEngine, ...]:
    """Ask every engine (role, and what `engine_spec` reads) for its models and metrics.

    Raises LocalError that tells of all those that cannot be used, and what to do; ValueError for a
    specification that is none.
    """
    return asyncio.run(_look_at([(role, engine_spec(text)) for role, text in given]))


async def _look_at(given: list[tuple[Role, EngineSpec]]) -> tuple[AttachedEngine, ...]:
    async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False) as client:
        found = await asyncio.gather(
            *(_ask(client, role, spec) for role, spec in given), return_exceptions=True
        )
    engines: list[AttachedEngine] = []
    problems: list[str] = []
    for (role, spec), one in zip(given, found, strict=True):
        if isinstance(one, AttachedEngine):
            engines.append(one)
        elif isinstance(one, _Unfit):
            problems.append(f"--{role.value}-url {spec.url}: {one}")
        else:
            raise one
    if problems:
        raise LocalError("\n  ".join(["These engines cannot be used:", *problems]))
    return tuple(engines)


class _Unfit(Exception):
    """Why an engine cannot be used, and what to do."""


async def _ask(client: httpx.AsyncClient, role: Role, spec: EngineSpec) -> AttachedEngine:
    models = await _models(client, spec.url)
    try:
        families = {
            f.name: f for f in text_string_to_metric_families(await _get(client, spec.url, "/metrics"))
        }
    except ValueError:
        families = {}
    if not any(name.startswith("vllm:") for name in families):
        raise _Unfit("is no vLLM engine: its /metrics has none of vLLM's")
    if not any(name.startswith(_NIXL) for name in families):
        flag = kv_transfer_config(ConnectorChoice("nixl", ""), role, "cuda")
        raise _Unfit(
            f"has no NIXL connector, or is older than vLLM 0.12, which shows one in its /metrics ({_NIXL}…). "
            f"Start it with --kv-transfer-config '{flag}'"
        )
    cache = families.get("vllm:cache_config_info")
    sizes = [s.labels.get("block_size", "") for s in cache.samples] if cache else []
    return AttachedEngine(
        role=role,
        spec=spec,
        models=models,
        block_size=next((int(size) for size in sizes if size.isdecimal() and int(size)), None),
        takes_kv=_TAKES_KV in families,
    )


async def _models(client: httpx.AsyncClient, url: str) -> tuple[str, ...]:
    answer = await _get(client, url, "/v1/models")
    try:
        cards: list[dict[str, Any]] = json.loads(answer)["data"]
        names = tuple(str(card["id"]) for card in cards if not card.get("parent"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _Unfit("is no vLLM engine: its /v1/models is not a list of models") from None
    if not names:
        raise _Unfit("its /v1/models names no model")
    return names


async def _get(client: httpx.AsyncClient, url: str, path: str) -> str:
    body = bytearray()
    try:
        async with asyncio.timeout(_WHOLE_SECONDS), client.stream("GET", url + path) as answer:
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise _Unfit(
                        f"answers {path} with more than {_MOST_BYTES >> 20} MiB: is it a vLLM engine?"
                    )
    except TimeoutError:
        raise _Unfit(f"has not come to the end of {path} in {_WHOLE_SECONDS:g} s: does it hang?") from None
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        why = str(error) or "no answer"
        raise _Unfit(f"cannot be reached: {why}. Start the engine first, or correct the URL") from None
    except httpx.TimeoutException:
        raise _Unfit(f"has not answered {path} for {_TIMEOUT.read:g} s: does it hang?") from None
    except httpx.HTTPError as error:
        raise _Unfit(f"does not speak HTTP: {str(error) or type(error).__name__}") from None
    if answer.status_code == 401:
        raise _Unfit("asks for an API key, which the router does not have: start it without --api-key")
    if answer.status_code != 200:
        raise _Unfit(f"answers {path} with HTTP {answer.status_code}: is it a vLLM engine, and ready?")
    return body.decode("utf-8", "replace")
