"""The router's configuration and its command line, kept in one place so that what is rendered can be read.

`tandem up` and the operator render a `RouterConfig` with `router_argv`; `tandem router` reads it back
with `add_router_arguments` and `router_config`. Both directions come from the one table of fields below.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

STRATEGIES = ("prefixaware", "session", "roundrobin")
CONNECTORS = ("nixl", "lmcache")


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


@dataclass(frozen=True)
class ReceiverPorts:
    """Where a decode engine's LMCache takes KV; `host` is None where it is the engine's own."""

    host: str | None
    init: tuple[int, ...]
    alloc: tuple[int, ...]


def receiver_ports(text: str) -> ReceiverPorts:
    """`[HOST:]INIT[,INIT…]:ALLOC[,ALLOC…]`, one port of each kind for each rank; else a ValueError."""
    host, colon, ports = text.rpartition(":")
    host, given, inits = host.rpartition(":") if colon else ("", "", "")
    try:
        init, alloc = (tuple(_port(p) for p in part.split(",")) for part in (inits, ports))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not [HOST:]INIT[,INIT…]:ALLOC[,ALLOC…], as in 10.0.0.8:7300:7400: {error}"
        ) from None
    if len(init) != len(alloc):
        raise ValueError(f"{text!r} has {len(init)} init ports and {len(alloc)} alloc ports")
    if given and not host:
        raise ValueError(f"{text!r} has an empty host")
    return ReceiverPorts(host or None, init, alloc)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ValueError(f"{text!r} is not a port")
    return int(text)


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """A parser that keeps the text as it is once `check` has accepted it."""

    def parse(text: str) -> str:
        check(text)
        return text

    return parse


def _header_name(text: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9-]+", text):
        raise ValueError(f"{text!r} is not the name of a header, as in x-session-id")


def _listen_address(text: str) -> None:
    host, colon, port = text.rpartition(":")
    if not host or not colon or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text!r} is not HOST:PORT, as in 0.0.0.0:7500")


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
        f"how the prefiller is chosen: {', '.join(STRATEGIES)}", _one_of(STRATEGIES), "prefixaware"
    )
    session_header: str = _option(
        "request header whose value names a session, for the strategy session",
        _checked(_header_name),
        "x-session-id",
    )
    kv_block_size: int = _option(
        "tokens of the engines' KV blocks (their --block-size), for the strategy prefixaware",
        _between(1, 65_536, int),
        16,
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
    count_in_process_bytes: int = _option(
        "bodies from so many bytes on (lists of token ids from an eighth of it) are counted in a process of "
        "their own, so that streams do not wait for them; 0 = none, and no such process",
        _between(0, 2**31 - 1, int),
        65_536,
    )
    count_cache_bytes: int = _option(
        "bytes of chats and their token ids that are remembered, so that a growing chat is not tokenized "
        "from its start again; in the router and in its counting process each; 0 = none",
        _between(0, 2**40, int),
        33_554_432,
    )
    served_model_name: tuple[str, ...] = _option(
        "model names that requests may use; default: those the engines report", default=()
    )
    connect_timeout: float = _option(
        "longest wait for a connection to an engine, in seconds", _between(0.05, 600, float), 3.0
    )
    prefill_timeout: float = _option(
        "longest wait for the prefill leg's answer, in seconds; --seconds-per-1000-tokens adds to it",
        _between(0.1, 86_400, float),
        60.0,
    )
    first_token_timeout: float = _option(
        "longest wait for the decode leg's first token, in seconds; --seconds-per-1000-tokens adds to it",
        _between(0.1, 86_400, float),
        60.0,
    )
    answer_timeout: float = _option(
        "what an answer that is not streamed may take beyond that, in seconds: it comes whole at its end",
        _between(0, 86_400, float),
        600.0,
    )
    seconds_per_1000_tokens: float = _option(
        "what every thousand prompt tokens that an engine has to compute first add to those two time-outs: "
        "the slowest pace at which it still counts as alive",
        _between(0, 3600, float),
        20.0,
    )
    stream_idle_timeout: float = _option(
        "longest silence in the middle of an answer, in seconds", _between(0.1, 86_400, float), 300.0
    )
    max_attempts: int = _option(
        "prefill legs, and decode legs, that one request may take in all", _between(1, 16, int), 3
    )
    retry_ratio: float = _option(
        "retries for each request in the long run; beside these, 50 at once and 1 a second are free",
        _between(0, 10, float),
        0.2,
    )
    suspect_after: int = _option(
        "failed legs in a row after which an engine is used only where no other is left, until it has "
        "answered a canary",
        _between(1, 10_000, int),
        5,
    )
    max_fallbacks: int = _option(
        "long prompts that decoders may compute at once when no prefiller can", _between(0, 10_000, int), 2
    )
    max_fallback_tokens: int = _option(
        "tokens of such prompts at once; one alone may have more", _between(0, 2**31 - 1, int), 32_768
    )
    reservation_timeout: float = _option(
        "longest wait for room in a decoder's receive buffer, in seconds; then a decoder computes the prompt",
        _between(0, 3600, float),
        30.0,
    )
    reservation_queue: int = _option(
        "requests that may wait for room in a receive buffer", _between(0, 1_000_000, int), 256
    )
    max_concurrent_requests: int | None = _option(
        "requests served at once for each decode engine in use (`requestLimits.maxConcurrentRequests`)",
        _between(1, 2**31 - 1, int),
        None,
    )
    max_queue_size: int = _option(
        "requests that may wait beyond those, for each decode engine in use (`requestLimits.maxQueueSize`)",
        _between(0, 2**31 - 1, int),
        0,
    )
    queue_timeout: float = _option("longest wait in that queue, in seconds", _between(0, 60, float), 60.0)
    overflow_status_code: int = _option(
        "what the rest are answered (`requestLimits.overflowStatusCode`)", _between(400, 599, int), 429
    )
    lmcache_receivers: tuple[str, ...] = _option(
        "where each decode engine's LMCache takes KV, in the order of --decode: [HOST:]INIT:ALLOC, ports of "
        "several ranks joined by commas; one value without a host is for all",
        _checked(receiver_ports),
        (),
    )
    lmcache_notify: str = _option(
        "HOST:PORT to listen on for prefillers' notifications (LMCache's pd_proxy_host and pd_proxy_port)",
        _checked(_listen_address),
        "127.0.0.1:7500",
    )
    lmcache_chunk_size: int = _option("tokens of an LMCache chunk", _between(1, 1_000_000, int), 256)
    lmcache_buffer_chunks: int | None = _option(
        "chunks that a decode engine's receive buffer holds (pd_buffer_size over the bytes of a chunk)",
        _between(1, 2**31 - 1, int),
        None,
    )
    lmcache_ranks: int = _option(
        "ranks of a prefill engine that send notifications: its tensor-parallel size",
        _between(1, 4096, int),
        1,
    )
    lmcache_step_tokens: int | None = _option(
        "tokens that a prefill engine computes in one step (its --max-num-batched-tokens); longer prompts, "
        "which are notified before they are whole, go to a decoder alone. Default: prompts take one step",
        _between(1, 2**31 - 1, int),
        None,
    )
    notification_timeout: float = _option(
        "longest wait for notifications after the prefill leg's answer, in seconds",
        _between(0.1, 600, float),
        10.0,
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
        if self.connector == "lmcache":
            self._check_lmcache()

    def _check_lmcache(self) -> None:
        if self.lmcache_buffer_chunks is None:
            raise ValueError("--lmcache-buffer-chunks: is needed with --connector lmcache")
        given = [receiver_ports(text) for text in self.lmcache_receivers]
        for text, ports in zip(self.lmcache_receivers, given, strict=True):
            if len(ports.init) < self.lmcache_ranks:
                raise ValueError(
                    f"--lmcache-receivers: {text!r} has ports for {len(ports.init)} ranks, and prefill "
                    f"engines have {self.lmcache_ranks} (--lmcache-ranks): each writes to a port of its own"
                )
        for_all = len(given) == 1 and given[0].host is None
        if not for_all and len(given) != len(self.decode):
            raise ValueError(
                f"--lmcache-receivers: {len(given)} are given for {len(self.decode)} decode engines; give "
                "one for each, or one without a host for all"
            )

    def receiver(self, decode_url: str) -> tuple[str, ReceiverPorts]:
        """The host and ports where a decode engine's LMCache takes KV (`--connector lmcache`)."""
        many = len(self.lmcache_receivers) > 1
        at = self.decode.index(decode_url) if many else 0
        ports = receiver_ports(self.lmcache_receivers[at])
        return ports.host or urlsplit(decode_url).hostname or "", ports

    def patience(self, timeout: float, tokens: int) -> float:
        """A time-out in seconds for an engine that has to compute so many prompt tokens first."""
        return timeout + self.seconds_per_1000_tokens * tokens / 1000


def _flag(f: Field[Any]) -> str:
    return "--" + f.name.replace("_", "-")


def _metavar(f: Field[Any]) -> str:
    if f.metadata["parse"] is engine_url:
        return "URL"
    named = {
        "model_path": "DIR",
        "tokenizer": "DIR",
        "max_model_len": "N",
        "max_concurrent_requests": "N",
        "lmcache_buffer_chunks": "N",
        "lmcache_step_tokens": "N",
        "lmcache_receivers": "[HOST:]INIT:ALLOC",
        "session_header": "NAME",
        "retry_ratio": "RATIO",
        "chat_template": "FILE",
        "default_chat_template_kwargs": "JSON",
        "lmcache_notify": "HOST:PORT",
    }
    by_kind = "SECONDS" if isinstance(f.default, float) else "N" if isinstance(f.default, int) else "NAME"
    return named.get(f.name, by_kind)


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
