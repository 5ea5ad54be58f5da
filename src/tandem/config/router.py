"""The router's configuration.

`tandem up` and the operator render a `RouterConfig` with `flags.router_argv`; `tandem router` reads it back
with `flags.add_router_arguments` and `flags.router_config`. Both directions come from the one table of fields
below.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.config.clients import ClientsConfig
from tandem.config.engines import EngineSpec, Subscription, engine_spec, engine_text, listening_host
from tandem.config.options import option as _option
from tandem.config.values import (
    ReceiverPorts,
    between,
    checked,
    dns_source,
    field_name,
    folder_path,
    header_name,
    json_object,
    kubernetes_source,
    label_name,
    listen_address,
    one_of,
    receiver_ports,
    request_path,
    some_text,
)

STRATEGIES = ("prefixaware", "kvaware", "session", "roundrobin")
CONNECTORS = ("nixl", "lmcache")
DECODING_PATH = "/ready/decode"
"""Where a router says whether requests are answered at all, by decoders alone where need be."""


def _overlap(host: str, other: str) -> bool:
    """Whether one address may be the other, or all of them."""
    return host == other or not {host, other}.isdisjoint({"0.0.0.0", "::"})


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ClientsConfig):
    """What one router process is started with. Times are seconds, sizes are bytes."""

    # The router
    host: str = _option("address to listen on", listening_host, "127.0.0.1")
    port: int = _option("port to listen on; 0 takes a free one", between(0, 65535, int), 8000)
    log_level: str = _option(
        "least severe level logged", one_of(("debug", "info", "warning", "error")), "info"
    )
    drain_delay: float = _option(
        "on SIGTERM, seconds in which requests are still taken while /ready says no",
        between(0, 600, float),
        0.0,
    )
    drain_timeout: float = _option(
        "on SIGTERM, seconds that running answers may take to finish", between(0, 86_400, float), 30.0
    )
    explain: bool = _option(
        "answer `x-tandem-explain: 1` with the path taken, the engines compared and their scores",
        default=False,
    )
    invocation_path: str = _option(
        "path where a request's body says which API it is for, as in SageMaker's containers "
        "(`spec.invocationEndpoint`)",
        checked(request_path),
        "/invocations",
    )
    admin_host: str = _option("address of the admin port", listening_host, "127.0.0.1")
    admin_port: int | None = _option(
        "port for /engines, /admin/route and /metrics, which the public port then does not serve; 0 takes a "
        "free one. Default: none",
        between(0, 65535, int),
        None,
    )

    # Identity
    api_keys_file: str | None = _option(
        "file that lists the API keys that clients must have, and their limits; it is watched. Default: "
        "everybody may call",
        checked(some_text),
        None,
    )
    engine_authorization: str | None = _option(
        "what becomes of a client's header Authorization: engines get it (pass) or do not (drop). Default: "
        "pass; with --api-keys-file, whose keys are not for engines, and with --engine-key-file drop",
        one_of(("pass", "drop")),
        None,
    )
    engine_key_file: str | None = _option(
        "file with the key that every engine gets with every call (vLLM's --api-key); it is watched",
        checked(some_text),
        None,
    )

    # Engines
    prefill: tuple[str, ...] = _option(
        "base URLs of the prefill engines; after a comma labels, as in http://10.0.0.7:8081,zone=a",
        engine_text,
        (),
    )
    decode: tuple[str, ...] = _option("base URLs of the decode engines", engine_text, ())
    engine: tuple[str, ...] = _option(
        "base URLs of engines without a role, each of which serves whole requests", engine_text, ()
    )
    discover_file: str | None = _option("file that lists engines; it is watched", checked(some_text), None)
    discover_dns: tuple[str, ...] = _option(
        "ROLE=NAME:PORT (addresses of a name) or ROLE=_SERVICE._tcp.NAME (SRV records); ROLE is prefill, "
        "decode or both",
        checked(dns_source),
        (),
    )
    discover_kubernetes: str | None = _option(
        "NAMESPACE:PORT:SELECTOR, as in models:8081:app=llama: pods of Kubernetes by labels; their roles are "
        "in the label inference.sagemaker.aws.amazon.com/dpd-role",
        checked(kubernetes_source),
        None,
    )
    discovery_stale_after: float = _option(
        "seconds without a sign of life from the API server, which gives one about each minute, after which "
        "/ready says no; requests are served on",
        between(1, 86_400, float),
        120.0,
    )
    connector: str = _option(
        f"KV connector of the engines: {', '.join(CONNECTORS)}", one_of(CONNECTORS), "nixl"
    )
    pair_labels: tuple[str, ...] = _option(
        "labels in which a prefill and a decode engine that both have them must agree to be used together "
        "(default model, kv-layout; with --connector lmcache also tp; without --discover-kubernetes also "
        "revision)",
        checked(label_name),
        (),
    )
    ramp_up: float = _option(
        "seconds in which an engine that joins others, or comes back, reaches its full share of requests",
        between(0, 3600, float),
        30.0,
    )
    suspect_after: int = _option(
        "failed legs in a row after which an engine is used only where no other is left, until it has "
        "answered a canary",
        between(1, 10_000, int),
        5,
    )

    # Routing
    served_model_name: tuple[str, ...] = _option(
        "model names that requests may use; default: those the engines report", checked(some_text), ()
    )
    routing_threshold: int = _option(
        "prompt tokens from which a request is disaggregated; 0 = always", between(0, 2**31 - 1, int), 4096
    )
    uncached_threshold: bool = _option(
        "do not count towards --routing-threshold what the chosen decoder has in its cache already",
        default=False,
    )
    routing_strategy: str = _option(
        f"how the prefiller, or an engine without a role, is chosen: {', '.join(STRATEGIES)}",
        one_of(STRATEGIES),
        "prefixaware",
    )
    session_header: tuple[str, ...] = _option(
        "request headers whose value names a session, for the strategy session; the first that is there "
        "counts (default x-session-id)",
        checked(header_name),
        (),
    )
    session_field: str | None = _option(
        "field of the body whose text names a session where no header does, as in user",
        checked(field_name),
        None,
    )

    # KV cache and events
    kv_block_size: int = _option(
        "tokens of the engines' KV blocks (their --block-size), for the strategies prefixaware and kvaware",
        between(1, 65_536, int),
        16,
    )
    kv_events: str | None = _option(
        "where engines publish KV events, for the strategy kvaware; * is the engine's own host, as in "
        "tcp://*:5557. An engine's own is given as in http://10.0.0.7:8081,kv-events=tcp://10.0.0.7:5557",
        checked(Subscription),
        None,
    )
    kv_replay: str | None = _option(
        "where they replay those that were missed, as in tcp://*:6557", checked(Subscription), None
    )
    kv_ranks: int = _option(
        "data-parallel ranks of an engine, each of which publishes on a port higher by one",
        between(1, 4096, int),
        1,
    )
    kv_index_blocks: int = _option(
        "KV blocks that the index of kvaware keeps in all, about 170 bytes each",
        between(1, 2**31 - 1, int),
        4_000_000,
    )

    # Counting prompts
    model_path: str | None = _option(
        "folder of the model: its tokenizer and chat template. Without it, --tokenizer or "
        "--model-files-path, engines count",
        checked(some_text),
        None,
    )
    tokenizer: str | None = _option(
        "folder of the tokenizer, when it is not the model's", checked(some_text), None
    )
    chat_template: str | None = _option(
        "chat template (file or text), when it is not the model's; the same as the engines'",
        checked(some_text),
        None,
    )
    chat_template_content_format: str = _option(
        "auto, string or openai; the same as the engines'", one_of(("auto", "string", "openai")), "auto"
    )
    default_chat_template_kwargs: str | None = _option(
        "JSON object of template arguments; the same as the engines'", json_object, None
    )
    exclude_tools_when_tool_choice_none: bool = _option(
        "leave tools out of the prompt when tool_choice is none; as the engines do", default=False
    )
    max_model_len: int | None = _option(
        "longest context in tokens; the same as the engines'", between(1, 2**31 - 1, int), None
    )
    counted_model: tuple[str, ...] = _option(
        "model names that --model-path, or --model-files-path, is for, where engines serve several; default: "
        "all. Prompts for others are counted by engines",
        checked(some_text),
        (),
    )
    model_files_path: str | None = _option(
        "path under which engines serve their model's tokenizer files, as in /tandem/model/; they are "
        "fetched, and prompts are counted with them, while the engines agree. Default: none",
        checked(folder_path),
        None,
    )
    model_files_cache: str | None = _option(
        "folder where files that were fetched are kept, named by their content; for this router alone. "
        "Default: a temporary one",
        checked(some_text),
        None,
    )
    count_in_process_bytes: int = _option(
        "bodies from so many bytes on (lists of token ids from an eighth of it) are counted in a process of "
        "their own, so that streams do not wait for them; 0 = none, and no such process. What is counted "
        "with files that were fetched always is, shorter bodies in another one",
        between(0, 2**31 - 1, int),
        65_536,
    )
    count_cache_bytes: int = _option(
        "bytes of chats and their token ids that are remembered, so that a growing chat is not tokenized "
        "from its start again; in the router and in its counting process each; 0 = none",
        between(0, 2**40, int),
        33_554_432,
    )

    # Time-outs and retries
    connect_timeout: float = _option(
        "longest wait for a connection to an engine, in seconds", between(0.05, 600, float), 3.0
    )
    prefill_timeout: float = _option(
        "longest wait for the prefill leg's answer, in seconds; --seconds-per-1000-tokens adds to it",
        between(0.1, 86_400, float),
        60.0,
    )
    first_token_timeout: float = _option(
        "longest wait for the decode leg's first token, in seconds; --seconds-per-1000-tokens adds to it",
        between(0.1, 86_400, float),
        60.0,
    )
    answer_timeout: float = _option(
        "what an answer that is not streamed may take beyond that, in seconds: it comes whole at its end",
        between(0, 86_400, float),
        600.0,
    )
    stream_idle_timeout: float = _option(
        "longest silence in the middle of an answer, in seconds", between(0.1, 86_400, float), 300.0
    )
    seconds_per_1000_tokens: float = _option(
        "what every thousand prompt tokens that an engine has to compute first add to those two time-outs: "
        "the slowest pace at which it still counts as alive",
        between(0, 3600, float),
        20.0,
    )
    max_attempts: int = _option(
        "prefill legs, and decode legs, that one request may take in all", between(1, 16, int), 3
    )
    retry_ratio: float = _option(
        "retries for each request in the long run; beside these, 50 at once and 1 a second are free",
        between(0, 10, float),
        0.2,
    )

    # Limits
    max_concurrent_requests: int | None = _option(
        "requests served at once for each engine in use that answers (`requestLimits.maxConcurrentRequests`)",
        between(1, 2**31 - 1, int),
        None,
    )
    max_queue_size: int = _option(
        "requests that may wait beyond those, for each such engine (`requestLimits.maxQueueSize`)",
        between(0, 2**31 - 1, int),
        0,
    )
    queue_timeout: float = _option("longest wait in that queue, in seconds", between(0, 60, float), 60.0)
    overflow_status_code: int = _option(
        "what the rest are answered (`requestLimits.overflowStatusCode`)", between(400, 599, int), 429
    )
    max_fallbacks: int = _option(
        "long prompts that decoders may compute at once when no prefiller can", between(0, 10_000, int), 2
    )
    max_fallback_tokens: int = _option(
        "tokens of such prompts at once; one alone may have more", between(0, 2**31 - 1, int), 32_768
    )
    reservation_timeout: float = _option(
        "longest wait for room in a decoder's receive buffer, in seconds; then a decoder computes the prompt",
        between(0, 3600, float),
        30.0,
    )
    reservation_queue: int = _option(
        "requests that may wait for room in a receive buffer", between(0, 1_000_000, int), 256
    )

    # LMCache
    lmcache_receivers: tuple[str, ...] = _option(
        "where each decode engine's LMCache takes KV, in the order of --decode: [HOST:]INIT:ALLOC, ports of "
        "several ranks joined by commas; one value without a host is for all",
        checked(receiver_ports),
        (),
    )
    lmcache_notify: str = _option(
        "HOST:PORT to listen on for prefillers' notifications (LMCache's pd_proxy_host and pd_proxy_port)",
        checked(listen_address),
        "127.0.0.1:7500",
    )
    lmcache_chunk_size: int = _option("tokens of an LMCache chunk", between(1, 1_000_000, int), 256)
    lmcache_buffer_chunks: int | None = _option(
        "chunks that a decode engine's receive buffer holds (pd_buffer_size over the bytes of a chunk)",
        between(1, 2**31 - 1, int),
        None,
    )
    lmcache_ranks: int = _option(
        "ranks of a prefill engine that send notifications: its tensor-parallel size",
        between(1, 4096, int),
        1,
    )
    lmcache_step_tokens: int | None = _option(
        "tokens that a prefill engine computes in one step (its --max-num-batched-tokens); longer prompts, "
        "which are notified before they are whole, go to a decoder alone. Default: prompts take one step",
        between(1, 2**31 - 1, int),
        None,
    )
    notification_timeout: float = _option(
        "longest wait for notifications after the prefill leg's answer, in seconds",
        between(0.1, 600, float),
        10.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill and not (self.decode or self.discovers):
            raise ValueError("--prefill: prefill engines need decode engines to hand over to (--decode)")
        if not (self.decode or self.engine or self.discovers):
            raise ValueError(
                "no engines are given: at least one decode engine is needed (--decode), or engines without a "
                "role (--engine), or a source of engines (--discover-file, --discover-dns, "
                "--discover-kubernetes)"
            )
        if self.port and self.port == self.admin_port and _overlap(self.host, self.admin_host):
            raise ValueError(f"--port and --admin-port: both are {self.port}; give the admin port another")
        seen: dict[str, str] = {}
        for name in ("prefill", "decode", "engine"):
            for spec in self.specs(name):
                if seen.get(spec.url) == name:
                    raise ValueError(f"--{name}: {spec.url} is given twice")
                if spec.url in seen:
                    raise ValueError(f"--{seen[spec.url]} and --{name}: {spec.url} is in both")
                seen[spec.url] = name
        for name in ("kv_replay", "kv_ranks"):
            if self.kv_events is None and getattr(self, name) not in (None, 1):
                raise ValueError(f"--{name.replace('_', '-')}: needs --kv-events, which is not given")
        if self.model_files_path is not None and (self.model_path or self.tokenizer):
            given = "--model-path" if self.model_path else "--tokenizer"
            raise ValueError(
                f"--model-files-path: files are fetched where none are here; it excludes {given}"
            )
        if self.engine_key_file is not None and self.engine_authorization == "pass":
            raise ValueError("--engine-authorization pass: excludes --engine-key-file, which takes its place")
        if self.model_files_path is None and self.model_files_cache is not None:
            raise ValueError("--model-files-cache: is of use with --model-files-path only")
        try:
            self.subscription("localhost")
        except ValueError as error:
            raise ValueError(f"--kv-events, --kv-replay with --kv-ranks {self.kv_ranks}: {error}") from None
        self._check_endpoints()
        if self.connector == "lmcache":
            self._check_lmcache()

    def _check_endpoints(self) -> None:
        """What one engine publishes must not be taken for what several hold."""
        known: dict[str, str] = {}
        for name in ("prefill", "decode", "engine"):
            for spec in self.specs(name):
                for endpoint in sorted(of.endpoints) if (of := self.subscription_of(spec)) else ():
                    if endpoint in known:
                        raise ValueError(
                            f"--kv-events: {known[endpoint]} and {spec.url} would both be followed at "
                            f"{endpoint}; give each its own, as in {spec.url},kv-events=tcp://*:5558"
                        )
                    known[endpoint] = spec.url

    @property
    def passes_authorization(self) -> bool:
        """Whether engines get the header Authorization as clients send it."""
        own = self.api_keys_file is not None or self.engine_key_file is not None
        return not own if self.engine_authorization is None else self.engine_authorization == "pass"

    @property
    def discovers(self) -> bool:
        """Whether there may be engines that no flag names."""
        return bool(self.discover_file or self.discover_dns or self.discover_kubernetes)

    def specs(self, role: str) -> tuple[EngineSpec, ...]:
        """The engines given for a role (`prefill`, `decode`, `engine`)."""
        given: tuple[str, ...] = getattr(self, role)
        return tuple(map(engine_spec, given))

    def subscription(self, host: str) -> Subscription | None:
        """Where an engine on a host publishes its KV events, unless it has a subscription of its own."""
        if self.kv_events is None:
            return None
        return Subscription(self.kv_events, self.kv_replay, self.kv_ranks).at(host)

    def subscription_of(self, spec: EngineSpec) -> Subscription | None:
        """Where an engine publishes its KV events."""
        host = urlsplit(spec.url).hostname or ""
        return spec.kv_events.at(host) if spec.kv_events is not None else self.subscription(host)

    @property
    def session_headers(self) -> tuple[str, ...]:
        return self.session_header or ("x-session-id",)

    @property
    def pairing(self) -> tuple[str, ...]:
        """The labels in which the engines of a pair must agree."""
        tp = ("tp",) if self.connector == "lmcache" else ()
        # The revision of a pod is that of its Deployment, of which each role has one.
        revision = () if self.discover_kubernetes else ("revision",)
        return self.pair_labels or ("model", *revision, "kv-layout", *tp)

    def _check_lmcache(self) -> None:
        if self.lmcache_buffer_chunks is None:
            raise ValueError("--connector lmcache: needs --lmcache-buffer-chunks, which is not given")
        if not self.lmcache_receivers and self.decode and not self.discovers:
            raise ValueError("--connector lmcache: needs --lmcache-receivers, which is not given")
        given = [receiver_ports(text) for text in self.lmcache_receivers]
        for text, ports in zip(self.lmcache_receivers, given, strict=True):
            if len(ports.init) < self.lmcache_ranks:
                raise ValueError(
                    f"--lmcache-receivers: {text!r} has ports for {len(ports.init)} ranks, and prefill "
                    f"engines have {self.lmcache_ranks} (--lmcache-ranks): each writes to a port of its own"
                )
        for_all = len(given) == 1 and given[0].host is None
        if not for_all and self.discovers:
            raise ValueError(
                "--lmcache-receivers: with engines that are discovered give one without a host, for all "
                "decode engines: which of several would be whose is not known"
            )
        if not for_all and len(given) != len(self.decode):
            raise ValueError(
                f"--lmcache-receivers: {len(given)} are given for {len(self.decode)} decode engines; give "
                "one for each, or one without a host for all"
            )

    def receiver(self, decode_url: str) -> tuple[str, ReceiverPorts]:
        """The host and ports where a decode engine's LMCache takes KV (`--connector lmcache`)."""
        many = len(self.lmcache_receivers) > 1
        at = [spec.url for spec in self.specs("decode")].index(decode_url) if many else 0
        ports = receiver_ports(self.lmcache_receivers[at])
        return ports.host or urlsplit(decode_url).hostname or "", ports

    def patience(self, timeout: float, tokens: int) -> float:
        """A time-out in seconds for an engine that has to compute so many prompt tokens first."""
        return timeout + self.seconds_per_1000_tokens * tokens / 1000
