"""The command line of `tandem router`, both ways: written by those who start a router, read by the router."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import Any

from tandem.config.router import RouterConfig

_SECTIONS = {
    "host": "The router",
    "api_keys_file": "Identity",
    "prefill": "Engines",
    "served_model_name": "Routing",
    "kv_block_size": "KV cache and events",
    "model_path": "Counting prompts",
    "connect_timeout": "Time-outs and retries",
    "max_concurrent_requests": "Limits",
    "max_connections": "Clients",
    "lmcache_receivers": "LMCache",
}
"""Titles of the sections in their order, by the field that each begins with."""


def _sections() -> Iterator[tuple[str, list[Field[Any]]]]:
    """(title, fields) of each section."""
    known = fields(RouterConfig)
    begins = [i for i, f in enumerate(known) if f.name in _SECTIONS]
    ends = [*begins[1:], len(known)]
    parts = {known[begin].name: list(known[begin:end]) for begin, end in zip(begins, ends, strict=True)}
    for name, title in _SECTIONS.items():
        yield title, parts[name]


def _flag(f: Field[Any]) -> str:
    return "--" + f.name.replace("_", "-")


def _metavar(f: Field[Any]) -> str:
    named = {
        "prefill": "URL",
        "decode": "URL",
        "engine": "URL",
        "kv_events": "ENDPOINT",
        "kv_replay": "ENDPOINT",
        "session_field": "NAME",
        "discover_file": "FILE",
        "api_keys_file": "FILE",
        "engine_authorization": "WHAT",
        "engine_key_file": "FILE",
        "discover_dns": "ROLE=NAME",
        "discover_kubernetes": "NAMESPACE:PORT:SELECTOR",
        "admin_port": "N",
        "model_path": "DIR",
        "tokenizer": "DIR",
        "model_files_path": "PATH",
        "model_files_cache": "DIR",
        "max_model_len": "N",
        "max_concurrent_requests": "N",
        "lmcache_buffer_chunks": "N",
        "lmcache_step_tokens": "N",
        "lmcache_receivers": "[HOST:]INIT:ALLOC",
        "session_header": "NAME",
        "invocation_path": "PATH",
        "retry_ratio": "RATIO",
        "chat_template": "FILE",
        "default_chat_template_kwargs": "JSON",
        "lmcache_notify": "HOST:PORT",
        "body_rate": "BYTES",
        "heartbeat": "SECONDS",
        "tls_certificate": "FILE",
        "tls_key": "FILE",
        "tls_client_ca": "FILE",
        "cors_origins": "ORIGIN",
        "cors_methods": "METHOD",
    }
    by_kind = "SECONDS" if isinstance(f.default, float) else "N" if isinstance(f.default, int) else "NAME"
    return named.get(f.name, by_kind)


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser one flag for each field of RouterConfig; list flags take several values and repeat."""
    for title, section in _sections():
        group = parser.add_argument_group(title)
        for f in section:
            group.add_argument(_flag(f), **_argument(f))


def _argument(f: Field[Any]) -> dict[str, Any]:
    """What argparse has to know of a flag."""
    help_text = f.metadata["help"]
    if isinstance(f.default, bool):
        return {"action": "store_true", "help": help_text}
    if f.default not in ((), None):
        help_text += f" (default {f.default})"
    told: dict[str, Any] = {
        "type": _argparse_type(f.metadata["parse"]),
        "metavar": _metavar(f),
        "help": help_text,
    }
    if f.default == ():
        return {**told, "nargs": "+", "action": "extend", "default": []}
    return {**told, "default": f.default}


def _argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def router_config(arguments: argparse.Namespace) -> RouterConfig:
    """The configuration that parsed flags describe. Raises ValueError where flags contradict each other."""
    values: dict[str, Any] = {f.name: getattr(arguments, f.name) for f in fields(RouterConfig)}
    lists: dict[str, Any] = {n: tuple(v) for n, v in values.items() if isinstance(v, list)}
    return RouterConfig(**{**values, **lists})


def router_argv(config: RouterConfig) -> list[str]:
    """The flags that describe a configuration; what equals its default is left out."""
    argv: list[str] = []
    for f in fields(config):
        value = getattr(config, f.name)
        if value == f.default:
            continue
        if isinstance(value, bool):
            argv.append(_flag(f))
        else:
            given = [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
            looks_like_flag = any(v.startswith("-") for v in given)
            argv += [f"{_flag(f)}={v}" for v in given] if looks_like_flag else [_flag(f), *given]
    return argv


def flags_tables() -> str:
    """Every flag of `tandem router` in Markdown tables, one for each section, for docs/configuration.md."""
    text = ""
    for title, section in _sections():
        text += f"### {title}\n| flag | default | meaning |\n|---|---|---|\n"
        text += "".join(f"| `{_flag(f)}` | {_default(f)} | {f.metadata['help']} |\n" for f in section) + "\n"
    return text


def _default(f: Field[Any]) -> str:
    if isinstance(f.default, bool):
        return "off"
    return "none" if f.default in ((), None) else f"`{f.default}`"
