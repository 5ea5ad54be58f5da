"""The router's configuration and its command line, kept in one place so that what is rendered can be read.

`tandem up` and the operator render a `RouterConfig` with `router_argv`; `tandem router` reads it back
with `add_router_arguments` and `router_config`. Both directions come from the one table of fields below.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

STRATEGIES = ("roundrobin",)
CONNECTORS = ("nixl",)


def engine_url(text: str) -> str:
    """`http://host:port` of an engine; a ValueError says what is wrong with anything else."""
    parts = urlsplit(text)
    if parts.scheme != "http":
        raise ValueError(f"{text!r} is not an http:// URL (engines are reached without TLS)")
    if not parts.hostname or parts.port is None:
        raise ValueError(f"{text!r} needs a host and a port, as in http://10.0.0.7:8081")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} must be a bare origin, as in http://10.0.0.7:8081")
    return f"http://{parts.netloc}"


def _between(low: float, high: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise ValueError(f"{text!r} is not {noun}") from None
        if not low <= value <= high:
            raise ValueError(f"{text} is outside {low:g} … {high:g}")
        return value

    return parse


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse


def _json_object(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return text


def _option(help: str, parse: Callable[[str], Any] = str, default: Any = MISSING) -> Any:
    metadata = {"help": help, "parse": parse}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What one router process is started with. Times are seconds, sizes are bytes."""

    host: str = _option("address to listen on", default="127.0.0.1")
    port: int = _option("port to listen on; 0 takes a free one", _between(0, 65535, int), 8000)
    prefill: tuple[str, ...] = _option("base URLs of the prefill engines", engine_url, ())
    decode: tuple[str, ...] = _option("base URLs of the decode engines", engine_url, ())
    routing_threshold: int = _option(
        "prompt tokens from which a request is disaggregated; 0 = always", _between(0, 2**31 - 1, int), 4096
    )
    routing_strategy: str = _option(
        f"how the prefiller is chosen: {', '.join(STRATEGIES)}", _one_of(STRATEGIES), "roundrobin"
    )
    connector: str = _option(
        f"KV connector of the engines: {', '.join(CONNECTORS)}", _one_of(CONNECTORS), "nixl"
    )
    model_path: str | None = _option("folder of the model: its tokenizer and chat template", default=None)
    tokenizer: str | None = _option("folder of the tokenizer, when it is not the model's", default=None)
    chat_template: str | None = _option(
        "chat template (file or text), when it is not the model's; the same as the engines'", default=None
    )
    chat_template_content_format: str = _option(
        "auto, string or openai; the same as the engines'", _one_of(("auto", "string", "openai")), "auto"
    )
    default_chat_template_kwargs: str | None = _option(
        "JSON object of template arguments; the same as the engines'", _json_object, None
    )
    exclude_tools_when_tool_choice_none: bool = _option(
        "leave tools out of the prompt when tool_choice is none; as the engines do", default=False
    )
    max_model_len: int | None = _option(
        "longest context in tokens; the same as the engines'", _between(1, 2**31 - 1, int), None
    )
    served_model_name: tuple[str, ...] = _option(
        "model names that requests may use; default: those the engines report", default=()
    )
    connect_timeout: float = _option(
        "longest wait for a connection to an engine, in seconds", _between(0.05, 600, float), 3.0
    )
    prefill_timeout: float = _option(
        "longest wait for the prefill leg's answer, in seconds", _between(0.1, 86_400, float), 600.0
    )
    first_token_timeout: float = _option(
        "longest wait for the decode leg's first token, in seconds", _between(0.1, 86_400, float), 600.0
    )
    stream_idle_timeout: float = _option(
        "longest silence in the middle of an answer, in seconds", _between(0.1, 86_400, float), 300.0
    )
    max_attempts: int = _option(
        "prefill legs, and decode legs, that one request may take in all", _between(1, 16, int), 3
    )
    max_fallbacks: int = _option(
        "long prompts that decoders may compute at once when no prefiller can", _between(0, 10_000, int), 2
    )
    drain_delay: float = _option(
        "on SIGTERM, seconds in which requests are still taken while /ready says no",
        _between(0, 600, float),
        0.0,
    )
    drain_timeout: float = _option(
        "on SIGTERM, seconds that running answers may take to finish", _between(0, 86_400, float), 30.0
    )
    explain: bool = _option("answer `x-tandem-explain: 1` with the path taken", default=False)
    log_level: str = _option(
        "least severe level logged", _one_of(("debug", "info", "warning", "error")), "info"
    )

    def __post_init__(self) -> None:
        if not self.decode:
            raise ValueError("--decode: at least one decode engine is needed")
        both = set(self.prefill) & set(self.decode)
        if both:
            raise ValueError(f"--prefill and --decode: {', '.join(sorted(both))} is in both")
        for name in ("prefill", "decode"):
            urls: tuple[str, ...] = getattr(self, name)
            if len(set(urls)) != len(urls):
                raise ValueError(f"--{name}: an engine is given twice")


def _flag(f: Field[Any]) -> str:
    return "--" + f.name.replace("_", "-")


def _metavar(f: Field[Any]) -> str:
    if f.metadata["parse"] is engine_url:
        return "URL"
    if isinstance(f.default, float):
        return "SECONDS"
    return {"model_path": "DIR", "tokenizer": "DIR", "max_model_len": "N"}.get(
        f.name, "N" if isinstance(f.default, int) else "NAME"
    )


def _is_list(f: Field[Any]) -> bool:
    return f.default == ()


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser one flag for each field of RouterConfig; list flags take several values and repeat."""
    for f in fields(RouterConfig):
        help_text = f.metadata["help"]
        if isinstance(f.default, bool):
            parser.add_argument(_flag(f), action="store_true", help=help_text)
            continue
        if f.default not in ((), None):
            help_text += f" (default {f.default})"
        kind = _argparse_type(f.metadata["parse"])
        if _is_list(f):
            parser.add_argument(
                _flag(f),
                type=kind,
                nargs="+",
                action="extend",
                default=[],
                metavar=_metavar(f),
                help=help_text,
            )
        else:
            parser.add_argument(_flag(f), type=kind, default=f.default, metavar=_metavar(f), help=help_text)


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


def flags_table() -> str:
    """Every flag of `tandem router` as rows of a Markdown table, for docs/configuration.md."""
    rows = []
    for f in fields(RouterConfig):
        if isinstance(f.default, bool):
            default = "off"
        else:
            default = "none" if f.default in ((), None) else f"`{f.default}`"
        rows.append(f"| `{_flag(f)}` | {default} | {f.metadata['help']} |")
    return "\n".join(rows)
