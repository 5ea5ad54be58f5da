"""The router's command line: what is rendered is read back, and what is wrong is said."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.config import (
    STRATEGIES,
    RouterConfig,
    add_router_arguments,
    router_argv,
    router_config,
    without_effect,
)
from tandem.config.engines import engine_spec, engine_url
from tandem.config.values import ReceiverPorts, kubernetes_source, receiver_ports

URLS = st.builds("http://10.0.0.{}:{}".format, st.integers(0, 255), st.integers(1, 65535))
# Any argument of a process; argparse takes `--` for itself.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).filter(
    lambda text: text != "--"
) | st.sampled_from(["-x", "--port", "-1", "- a", "--a b"])
TEXT = TEXT.filter(str.strip)
LISTENING = st.sampled_from(
    ["0.0.0.0", "::", "::1", "127.0.0.1", "localhost", "Router-0.models.svc", "fe80::1%eth0"]
)


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


PORTS = st.integers(1, 65535)
HOSTS = st.sampled_from(["10.0.0.8", "d-0.example", "[fd00::8]"])


@st.composite
def lmcache(draw: st.DrawFn, decoders: int) -> dict[str, Any]:
    """The flags of the lmcache connector, for so many decoders."""
    ranks = draw(st.integers(1, 3))
    ports = st.lists(PORTS, min_size=ranks, max_size=ranks).map(lambda p: ",".join(map(str, p)))
    one = st.builds("{}:{}".format, ports, ports)
    each = st.lists(one | st.builds("{}:{}".format, HOSTS, one), min_size=decoders, max_size=decoders)
    return {
        "connector": "lmcache",
        "lmcache_receivers": tuple(draw(each | one.map(lambda receiver: [receiver]))),
        "lmcache_notify": draw(st.sampled_from(["0.0.0.0:7500", "[::]:0", "127.0.0.1:65535"])),
        "lmcache_chunk_size": draw(st.integers(1, 1_000_000)),
        "lmcache_buffer_chunks": draw(st.integers(1, 2**31 - 1)),
        "lmcache_ranks": draw(st.integers(1, ranks)),
        "lmcache_step_tokens": draw(st.none() | st.integers(1, 2**31 - 1)),
        "notification_timeout": draw(seconds(0.1, 600)),
    }


ATTRIBUTES = st.sampled_from(
    [
        "",
        ",zone=a",
        ",model=m/x,zone=a",
        ",kv-events=ipc:///run/x,kv-replay=ipc:///run/y",
        ",kv-events=tcp://*:5",
    ]
)


@st.composite
def kv_events(draw: st.DrawFn) -> dict[str, Any]:
    ports = st.integers(1, 60_000)
    return {
        "kv_events": f"tcp://*:{draw(ports)}",
        "kv_replay": draw(st.none() | st.builds("tcp://[::1]:{}".format, ports)),
        "kv_ranks": draw(st.integers(1, 4096)),
    }


@st.composite
def discovered(draw: st.DrawFn) -> dict[str, Any]:
    names = st.sampled_from(["prefill=p.svc:8081", "both=_http._tcp.x"])
    pods = st.sampled_from(["models:8081:app=llama", "ns:1:a in (b,c),!d,e!=f,g.h/i,j notin (k)"])
    return {
        "discover_file": draw(st.none() | TEXT),
        "discover_dns": tuple(draw(st.lists(names))),
        "discover_kubernetes": draw(st.none() | pods),
        "discovery_stale_after": draw(seconds(1, 86_400)),
    }


@st.composite
def identity(draw: st.DrawFn) -> dict[str, Any]:
    key = draw(st.none() | TEXT)
    return {
        "api_keys_file": draw(st.none() | TEXT),
        "engine_key_file": key,
        "engine_authorization": draw(st.sampled_from([None, "drop", *([] if key else ["pass"])])),
    }


@st.composite
def counting(draw: st.DrawFn) -> dict[str, Any]:
    """Files that are here, or that are fetched."""
    if draw(st.booleans()):
        return {"model_path": draw(st.none() | TEXT), "tokenizer": draw(st.none() | TEXT)}
    cache = draw(st.none() | TEXT)
    return {"model_files_path": draw(st.sampled_from(["/", "/tandem/model/"])), "model_files_cache": cache}


@st.composite
def clients(draw: st.DrawFn) -> dict[str, Any]:
    """How clients are served."""
    tls: dict[str, Any] = {}
    if draw(st.booleans()):
        names = st.sampled_from(["/etc/tls/tls.crt", "-x", "a b"])
        tls = {
            "tls_certificate": draw(names),
            "tls_key": draw(names),
            "tls_client_ca": draw(st.none() | names),
        }
    origins = st.lists(st.sampled_from(["https://app.example", "http://[::1]:3000"]), max_size=2)
    return {
        **tls,
        "max_connections": draw(st.integers(1, 1_000_000)),
        "max_head_bytes": draw(st.integers(1024, 2**24)),
        "max_body_bytes": draw(st.integers(1, 2**30)),
        "max_held_bytes": draw(st.integers(2**30, 2**40)),
        "head_timeout": draw(seconds(0.1, 3600)),
        "body_timeout": draw(seconds(0.1, 3600)),
        "body_rate": draw(seconds(0, 2**30)),
        "keep_alive_timeout": draw(seconds(0.1, 86_400)),
        "write_timeout": draw(seconds(0.1, 86_400)),
        "engine_keep_alive": draw(seconds(0, 3600)),
        "heartbeat": draw(st.none() | seconds(0.1, 3600)),
        "cors_origins": tuple(draw(origins | st.just(["*"]))),
        "cors_methods": tuple(draw(st.lists(st.sampled_from(["GET", "POST"]), max_size=2))),
        "cors_headers": tuple(draw(st.lists(st.sampled_from(["authorization", "x-a"]), max_size=2))),
    }


@st.composite
def configurations(draw: st.DrawFn) -> RouterConfig:
    urls = draw(st.lists(URLS, min_size=1, max_size=6, unique=True))
    decoders = draw(st.integers(1, len(urls)))
    fields: dict[str, Any] = dict(
        host=draw(LISTENING),
        port=draw(st.integers(0, 65535)),
        decode=tuple(url + draw(ATTRIBUTES) for url in urls[:decoders]),
        prefill=tuple(url + draw(ATTRIBUTES) for url in urls[decoders:]),
        engine=tuple(draw(st.sampled_from([[], ["http://whole.example:9"]]))),
        routing_threshold=draw(st.integers(0, 2**31 - 1)),
        routing_strategy=draw(st.sampled_from(STRATEGIES)),
        session_header=tuple(draw(st.lists(st.sampled_from(["x-session-id", "X-Conversation"]), max_size=2))),
        session_field=draw(st.sampled_from([None, "user"])),
        invocation_path=draw(st.sampled_from(["/invocations", "/", "/v1/completions", "/a/b~c"])),
        kv_block_size=draw(st.integers(1, 65_536)),
        **draw(st.just({}) | kv_events()),
        kv_index_blocks=draw(st.integers(1, 2**31 - 1)),
        uncached_threshold=draw(st.booleans()),
        pair_labels=tuple(draw(st.lists(st.sampled_from(["zone", "a/b.c-d_e"]), max_size=2))),
        ramp_up=draw(seconds(0, 3600)),
        counted_model=tuple(draw(st.lists(TEXT, max_size=2))),
        **draw(counting()),
        **draw(identity()),
        admin_host=draw(LISTENING),
        admin_port=draw(st.none() | st.integers(0, 65535)),
        chat_template=draw(st.none() | TEXT),
        chat_template_content_format=draw(st.sampled_from(["auto", "string", "openai"])),
        default_chat_template_kwargs=draw(st.none() | st.just('{"enable_thinking": false}')),
        exclude_tools_when_tool_choice_none=draw(st.booleans()),
        max_model_len=draw(st.none() | st.integers(1, 2**31 - 1)),
        served_model_name=tuple(draw(st.lists(TEXT, max_size=3))),
        connect_timeout=draw(seconds(0.05, 600)),
        prefill_timeout=draw(seconds(0.1, 86_400)),
        first_token_timeout=draw(seconds(0.1, 86_400)),
        answer_timeout=draw(seconds(0, 86_400)),
        stream_idle_timeout=draw(seconds(0.1, 86_400)),
        seconds_per_1000_tokens=draw(seconds(0, 3600)),
        max_attempts=draw(st.integers(1, 16)),
        retry_ratio=draw(seconds(0, 10)),
        suspect_after=draw(st.integers(1, 10_000)),
        max_fallbacks=draw(st.integers(0, 10_000)),
        max_fallback_tokens=draw(st.integers(0, 2**31 - 1)),
        reservation_timeout=draw(seconds(0, 3600)),
        reservation_queue=draw(st.integers(0, 1_000_000)),
        max_concurrent_requests=draw(st.none() | st.integers(1, 2**31 - 1)),
        max_queue_size=draw(st.integers(0, 2**31 - 1)),
        queue_timeout=draw(seconds(0, 60)),
        overflow_status_code=draw(st.integers(400, 599)),
        **draw(discovered() | lmcache(decoders)),
        **draw(clients()),
        drain_delay=draw(seconds(0, 600)),
        drain_timeout=draw(seconds(0, 86_400)),
        explain=draw(st.booleans()),
        log_level=draw(st.sampled_from(["debug", "info", "warning", "error"])),
    )
    try:
        return RouterConfig(**fields)
    except ValueError as error:
        assume("would both be followed" not in str(error))  # engines of one host, or with one endpoint
        assume("--port and --admin-port: both" not in str(error))
        raise


def test_every_rank_of_a_prefill_engine_has_a_port_to_write_to() -> None:
    """One without would die at its first prompt."""
    with pytest.raises(ValueError, match="ports for 1 ranks, and prefill engines have 4"):
        RouterConfig(
            decode=("http://d:1",),
            connector="lmcache",
            lmcache_receivers=("7300:7400",),
            lmcache_buffer_chunks=8,
            lmcache_ranks=4,
        )


@pytest.mark.parametrize("name", ["", "x session", "x:y", "ä"])
def test_a_session_header_is_a_header(name: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not the name of a header"):
        read(["--decode", "http://d:1", "--session-header", name])


def read(argv: list[str]) -> RouterConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_router_arguments(parser)
    return router_config(parser.parse_args(argv))


@given(configurations())
def test_any_configuration_survives_the_command_line(config: RouterConfig) -> None:
    assert read(router_argv(config)) == config


def test_only_what_differs_from_the_defaults_is_rendered() -> None:
    config = RouterConfig(decode=("http://d:1", "http://d:2"), explain=True, routing_threshold=0)
    assert router_argv(config) == [
        "--explain",
        "--decode",
        "http://d:1",
        "http://d:2",
        "--routing-threshold",
        "0",
    ]


def test_the_documented_command_line_is_read() -> None:
    flags = (
        "--host 0.0.0.0 --port 9000 --prefill http://p:1 http://p:2 --decode http://d:1 --decode http://d:2/ "
        "--routing-threshold 1024 --routing-strategy roundrobin --model-path /m --tokenizer /t "
        "--served-model-name a b"
    )
    config = read(flags.split())
    assert config == RouterConfig(
        host="0.0.0.0",
        port=9000,
        prefill=("http://p:1", "http://p:2"),
        decode=("http://d:1", "http://d:2"),
        routing_threshold=1024,
        routing_strategy="roundrobin",
        model_path="/m",
        tokenizer="/t",
        served_model_name=("a", "b"),
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--port 65536", "65536 is outside 0 … 65535"),
        ("--port x", "'x' is not a whole number"),
        ("--routing-threshold -1", "-1 is outside 0"),
        ("--routing-threshold 1.5", "'1.5' is not a whole number"),
        ("--connect-timeout nan", "nan is outside"),
        ("--connect-timeout soon", "'soon' is not a number"),
        ("--routing-strategy random", "'random' is not one of prefixaware, kvaware, session, roundrobin"),
        ("--connector mooncake", "'mooncake' is not one of nixl, lmcache"),
        ("--drain-delay 601", "601 is outside 0 … 600"),
        ("--max-attempts 0", "0 is outside 1 … 16"),
        ("--suspect-after 0", "0 is outside 1 … 10000"),
        ("--retry-ratio -0.1", "-0.1 is outside 0 … 10"),
        ("--max-concurrent-requests 0", "0 is outside 1"),
        ("--max-queue-size -1", "-1 is outside 0"),
        ("--queue-timeout 61", "61 is outside 0 … 60"),
        ("--overflow-status-code 200", "200 is outside 400 … 599"),
        ("--overflow-status-code 600", "600 is outside 400 … 599"),
        ("--lmcache-buffer-chunks 0", "0 is outside 1"),
        ("--lmcache-notify 7500", "'7500' is not HOST:PORT, as in 0.0.0.0:7500"),
        ("--lmcache-notify host:65536", "is not HOST:PORT"),
        ("--lmcache-notify :7500", "is not HOST:PORT"),
        ("--lmcache-receivers 7300", "'7300' is not [HOST:]INIT[,INIT…]:ALLOC[,ALLOC…]"),
        ("--lmcache-receivers 7300:x", "'x' is not a port"),
        ("--lmcache-receivers 0:7400", "'0' is not a port"),
        ("--lmcache-receivers 7300:65536", "'65536' is not a port"),
        ("--lmcache-receivers 7300,7301:7400", "has 2 init ports and 1 alloc ports"),
        ("--lmcache-receivers :7300:7400", "has an empty host"),
        ("--lmcache-notify ::1:7500", "an IPv6 address needs brackets"),
        ("--lmcache-notify [::1:7500", "is not HOST:PORT"),
        ("--lmcache-notify *:7500", "is not HOST:PORT"),
        (
            "--host *",
            "'*' is no name or address of a host, as 127.0.0.1; for all addresses give 0.0.0.0 or ::",
        ),
        ("--host [::1]", "'[::1]' is no name or address of a host"),
        ("--host 127.0.0.1:80", "'127.0.0.1:80' is no name or address of a host"),
        ("--admin-host http://localhost", "'http://localhost' is no name or address of a host"),
        ("--log-level loud", "'loud' is not one of debug"),
        ("--engine-authorization keep", "'keep' is not one of pass, drop"),
        ("--invocation-path invocations", "'invocations' is not a plain path, as /invocations"),
        ("--invocation-path /a?b", "'/a?b' is not a plain path"),
        ("--invocation-path /%61", "'/%61' is not a plain path"),
        ("--default-chat-template-kwargs [1]", "'[1]' is not a JSON object"),
        ("--max-connections 0", "0 is outside 1 … "),
        ("--max-head-bytes 1023", "1023 is outside 1024 … "),
        ("--max-body-bytes 0", "0 is outside 1 … "),
        ("--max-body-bytes 1073741825", "1073741825 is outside 1 … "),
        ("--head-timeout 0", "0 is outside 0.1 … 3600"),
        ("--body-timeout 3601", "3601 is outside 0.1 … 3600"),
        ("--body-rate -1", "-1 is outside 0 … "),
        ("--keep-alive-timeout 0", "0 is outside 0.1 … 86400"),
        ("--write-timeout inf", "inf is outside 0.1 … 86400"),
        ("--engine-keep-alive -1", "-1 is outside 0 … 3600"),
        ("--heartbeat 0", "0 is outside 0.1 … 3600"),
        ("--cors-origins app.example", "'app.example' is no origin, as https://app.example"),
        ("--cors-origins https://app.example/", "'https://app.example/' is no origin"),
        ("--cors-origins null", "'null' is no origin"),
        ("--cors-origins https://*.example", "'https://*.example' is no origin"),
        (
            "--cors-methods DELETE",
            "'DELETE' is none of GET, HEAD and POST, which are all that a router takes",
        ),
        ("--cors-headers x:y", "'x:y' is not the name of a header"),
        ("--prefill https://p:1", "'https://p:1' is not an http:// URL"),
        ("--prefill p:1", "'p:1' is not an http:// URL"),
        ("--prefill http://p", "'http://p' needs a host and a port"),
        ("--prefill http://p:1/v1", "'http://p:1/v1' must be a bare origin"),
        ("--prefill http://a:b@p:1", "must be a bare origin"),
    ],
)
def test_a_bad_value_is_told_with_its_flag(flags: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentError) as error:
        read(["--decode", "http://d:1", *flags.split()])
    assert str(error.value).startswith(f"argument {flags.split()[0]}: ")
    assert said in str(error.value)


TEXT_FLAGS = [
    "--host",
    "--admin-host",
    "--discover-file",
    "--api-keys-file",
    "--engine-key-file",
    "--served-model-name",
    "--model-path",
    "--tokenizer",
    "--chat-template",
    "--counted-model",
    "--model-files-cache",
    "--model-files-path",
    "--invocation-path",
    "--lmcache-notify",
    "--prefill",
    "--discover-dns",
    "--discover-kubernetes",
    "--kv-events",
    "--session-header",
    "--session-field",
    "--tls-certificate",
    "--tls-key",
    "--tls-client-ca",
    "--cors-origins",
    "--cors-methods",
    "--cors-headers",
]


@pytest.mark.parametrize("flag", TEXT_FLAGS)
@pytest.mark.parametrize("nothing", ["", " ", "\t"])
def test_nothing_is_no_value_of_any_flag(flag: str, nothing: str) -> None:
    """An empty host would listen everywhere, an empty file be none."""
    with pytest.raises(argparse.ArgumentError) as error:
        read(["--decode", "http://d:1", flag, nothing])
    assert str(error.value).startswith(f"argument {flag}: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "no engines are given: at least one decode engine is needed"),
        ("--prefill http://p:1", "--prefill: prefill engines need decode engines"),
        ("--prefill http://p:1 --engine http://e:1", "--prefill: prefill engines need decode engines"),
        ("--engine http://e:1 --kv-replay tcp://*:6", "--kv-replay: needs --kv-events, which is not given"),
        ("--engine http://e:1 --kv-ranks 2", "--kv-ranks: needs --kv-events, which is not given"),
        ("--engine http://e:1 --kv-events ipc:///x --kv-ranks 2", "--kv-ranks 2: 'ipc:///x' has no port"),
        ("--engine http://e:1 --kv-events tcp://*:65535 --kv-ranks 2", "with --kv-ranks 2: 'tcp://"),
        (
            "--decode http://a:1 --connector lmcache --lmcache-buffer-chunks 9",
            "--connector lmcache: needs --lmcache-receivers, which is not given",
        ),
        ("--decode http://a:1 --prefill http://a:1", "http://a:1 is in both"),
        ("--decode http://a:1 --port 9 --admin-port 9", "--port and --admin-port: both are 9; give"),
        (
            "--decode http://a:1 --host 0.0.0.0 --port 9 --admin-host 10.0.0.1 --admin-port 9",
            "--port and --admin-port: both are 9; give",
        ),
        (
            "--decode http://a:1 --max-held-bytes 9 --max-body-bytes 10",
            "--max-held-bytes: 9 is less than --max-body-bytes",
        ),
        ("--decode http://a:1 --tls-key k", "--tls-key: needs --tls-certificate, which is not given"),
        ("--decode http://a:1 --tls-certificate c", "--tls-certificate: needs --tls-key, which is not given"),
        ("--decode http://a:1 --tls-client-ca c", "--tls-client-ca: needs --tls-certificate and --tls-key"),
        (
            "--decode http://a:1 --cors-origins * https://a",
            "--cors-origins: \\* is all of them; give it alone",
        ),
        ("--decode http://a:1 http://a:1/", "--decode: http://a:1 is given twice"),
        ("--decode http://a:1 --prefill http://p:1 http://p:1", "--prefill: http://p:1 is given twice"),
        ("--decode http://a:1 --connector lmcache", "--connector lmcache: needs --lmcache-buffer-chunks"),
        (
            "--decode http://a:1 http://b:1 --kv-events tcp://10.0.0.7:5557",
            "--kv-events: http://a:1 and http://b:1 would both be followed at tcp://10.0.0.7:5557; give each",
        ),
        ("--decode http://a:1 --engine http://a:2 --kv-events tcp://*:5557", "followed at tcp://a:5557"),
        ("--decode http://a:1,kv-events=ipc:///e http://a:2,kv-events=ipc:///e", "followed at ipc:///e"),
        (
            "--decode http://a:1,kv-events=tcp://*:1,kv-ranks=3 http://a:2,kv-events=tcp://*:3",
            "followed at tcp://a:3",
        ),
        (
            "--decode http://a:1 --prefill http://b:1 --kv-events tcp://*:1 --kv-replay tcp://10.0.0.7:2",
            "http://b:1 and http://a:1 would both be followed at tcp://10.0.0.7:2",
        ),
        (
            "--decode http://a:1 http://a:2 http://a:3 --connector lmcache --lmcache-buffer-chunks 9 "
            "--lmcache-receivers 1:2 3:4",
            "2 are given for 3 decode engines; give one for each, or one without a host for all",
        ),
        (
            "--decode http://a:1 http://a:2 --connector lmcache --lmcache-buffer-chunks 9 "
            "--lmcache-receivers b:1:2",
            "1 are given for 2 decode engines",
        ),
        (
            "--decode http://a:1 --engine-authorization pass --engine-key-file key",
            "--engine-authorization pass: excludes --engine-key-file",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(flags.split())


@pytest.mark.parametrize(
    "source",
    [
        "--discover-file engines.yaml",
        "--discover-dns decode=d.svc:8082",
        "--discover-kubernetes models:8081:app=llama",
    ],
)
@pytest.mark.parametrize("decode", ["", "--decode http://a:1", "--decode http://a:1 http://a:2"])
@pytest.mark.parametrize("given_receivers", ["", "a:1:2", "1:2 3:4", "a:1:2 b:3:4"])
def test_decode_engines_that_are_discovered_have_their_receivers_where_one_says_for_all(
    source: str, decode: str, given_receivers: str
) -> None:
    """Of several it is not known whose they are, however many there are."""
    flags = f"{source} {decode} --connector lmcache --lmcache-buffer-chunks 9"
    receivers = f"--lmcache-receivers {given_receivers}" if given_receivers else ""
    with pytest.raises(ValueError, match="--lmcache-receivers: with engines that are discovered give one"):
        read(f"{flags} {receivers}".split())
    config = read(f"{flags} --lmcache-receivers 7300:7400".split())
    assert config.receiver("http://new:1") == ("new", ReceiverPorts(None, (7300,), (7400,)))


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ("", True),
        ("--api-keys-file f", False),
        ("--engine-key-file f", False),
        ("--engine-authorization drop", False),
        ("--engine-authorization pass --api-keys-file f", True),
    ],
)
def test_engines_get_a_clients_key_unless_it_is_the_routers(flags: str, passes: bool) -> None:
    assert read(["--decode", "http://a:1", *flags.split()]).passes_authorization is passes


def test_an_ipv6_engine_keeps_its_brackets() -> None:
    assert engine_url("http://[::1]:8100/") == "http://[::1]:8100"


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("7300:7400", ReceiverPorts(None, (7300,), (7400,))),
        ("10.0.0.8:7300:7400", ReceiverPorts("10.0.0.8", (7300,), (7400,))),
        ("d-0:1,2:3,4", ReceiverPorts("d-0", (1, 2), (3, 4))),
        ("[fd00::8]:7300:7400", ReceiverPorts("[fd00::8]", (7300,), (7400,))),
    ],
)
def test_receiver_ports_are_read(text: str, ports: ReceiverPorts) -> None:
    assert receiver_ports(text) == ports


def receivers(*given: str) -> RouterConfig:
    return RouterConfig(
        decode=("http://10.0.0.1:8000", "http://d-1:8000"),
        connector="lmcache",
        lmcache_receivers=given,
        lmcache_buffer_chunks=9,
    )


def test_one_receiver_without_a_host_is_for_each_decode_engine_at_its_own() -> None:
    config = receivers("7300:7400")
    ports = ReceiverPorts(None, (7300,), (7400,))
    assert config.receiver("http://10.0.0.1:8000") == ("10.0.0.1", ports)
    assert config.receiver("http://d-1:8000") == ("d-1", ports)


def test_receivers_are_in_the_order_of_the_decode_engines() -> None:
    config = receivers("1:2", "kv:3:4")
    assert config.receiver("http://10.0.0.1:8000") == ("10.0.0.1", ReceiverPorts(None, (1,), (2,)))
    assert config.receiver("http://d-1:8000") == ("kv", ReceiverPorts("kv", (3,), (4,)))


def test_patience_grows_with_the_tokens_that_an_engine_has_to_compute() -> None:
    config = RouterConfig(decode=("http://d:1",), seconds_per_1000_tokens=20.0)
    assert [config.patience(60.0, tokens) for tokens in (0, 1, 1000, 100_000)] == [60, 60.02, 80, 2060]
    assert RouterConfig(decode=("http://d:1",), seconds_per_1000_tokens=0).patience(60.0, 10**9) == 60


@pytest.mark.parametrize(
    "path", ["", "tandem/model/", "/tandem/model", "/a/../b/", "/./", "/a b/", "//", "/%2e/"]
)
def test_model_files_are_below_a_plain_path(path: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a plain path that ends in /"):
        read(["--decode", "http://d:1", "--model-files-path", path])


@pytest.mark.parametrize("flag", ["--model-path", "--tokenizer"])
def test_files_are_not_fetched_where_others_are_given(flag: str) -> None:
    with pytest.raises(ValueError, match=f"it excludes {flag}"):
        read(["--decode", "http://d:1", "--model-files-path", "/m/", flag, "/models/m"])
    with pytest.raises(ValueError, match="--model-files-cache: is of use with"):
        read(["--decode", "http://d:1", "--model-files-cache", "/tmp/x"])


def test_every_field_has_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    add_router_arguments(parser)
    text = parser.format_help()
    for field in fields(RouterConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("models:8081:app=llama", ("models", 8081, "app=llama")),
        ("a-1:1:a.b/c-d_e==F.g,app", ("a-1", 1, "a.b/c-d_e==F.g,app")),
        ("ns:80:!gone,x!=y,empty=", ("ns", 80, "!gone,x!=y,empty=")),
        (
            "ns:80:role in (prefill, decode),tier notin (x)",
            ("ns", 80, "role in (prefill, decode),tier notin (x)"),
        ),
    ],
)
def test_pods_are_named_by_namespace_port_and_labels(text: str, named: tuple[str, int, str]) -> None:
    assert kubernetes_source(text) == named


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not NAMESPACE:PORT:SELECTOR, as in models:8081:app=llama"),
        ("app=llama", "is not NAMESPACE:PORT:SELECTOR"),
        ("models:8081", "is not NAMESPACE:PORT:SELECTOR"),
        ("models:8081:", "is not NAMESPACE:PORT:SELECTOR"),
        ("models:8081: ", "is not NAMESPACE:PORT:SELECTOR"),
        ("Models:8081:app=llama", "is not NAMESPACE:PORT:SELECTOR"),
        ("-:8081:app=llama", "is not NAMESPACE:PORT:SELECTOR"),
        ("models:0:app=llama", "'0' is not a port"),
        ("models:http:app=llama", "'http' is not a port"),
        ("models:8081:app=llama,", "'' in the selector 'app=llama,' is none of NAME=VALUE"),
        ("models:8081:app=a b", "'app=a b' in the selector"),
        ("models:8081:app>1", "'app>1' in the selector"),
        ("models:8081:app in a,b", "'app in a' in the selector"),
        ("models:8081:app in (a,b", "'app in \\(a' in the selector"),
        ("models:8081:-app", "'-app' in the selector"),
        ("models:8081:app=" + "x" * 64, "in the selector"),
        ("models:8081:a:b=c", "'a:b=c' in the selector"),
    ],
)
def test_pods_that_are_named_in_no_such_way_are_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kubernetes_source(text)


@pytest.mark.parametrize("text", ["app=llama", "models:0:app=llama"])
def test_the_flag_refuses_them(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="--discover-kubernetes"):
        read(["--discover-kubernetes", text])


def test_pods_are_engines_enough() -> None:
    config = read(["--discover-kubernetes", "models:8081:app=llama", "--prefill", "http://p:1"])
    assert config.discovers
    assert config.discovery_stale_after == 120.0


def test_the_revision_of_a_pod_is_its_deployments_so_pairs_need_not_agree_in_it() -> None:
    assert "revision" in read(["--decode", "http://d:1"]).pairing
    pods = ["--discover-kubernetes", "models:8081:app=llama"]
    assert read(pods).pairing == ("model", "kv-layout")
    assert read([*pods, "--pair-labels", "revision"]).pairing == ("revision",)


# What has no effect

TWO = "--decode http://d:1 http://d:2"
PAIR = "--prefill http://p:1 http://q:1 --decode http://d:1"
LMCACHE = f"{PAIR} --connector lmcache --lmcache-buffer-chunks 9 --lmcache-receivers 1:2"
FILES = "--model-files-path /tandem/model/"
LIMIT = "--max-concurrent-requests 9"


@pytest.mark.parametrize(
    ("flags", "beside", "makes_it_count"),
    [
        ("--admin-host ::1", PAIR, "--admin-port 0"),
        ("--discovery-stale-after 60", PAIR, "--discover-kubernetes models:8081:app=llama"),
        ("--pair-labels zone", TWO, "--prefill http://p:1"),
        ("--pair-labels zone", TWO, "--discover-file engines.yaml"),
        ("--pair-labels zone", TWO, "--discover-dns prefill=p.svc:8081"),
        ("--routing-threshold 9", TWO, "--prefill http://p:1"),
        ("--uncached-threshold", TWO, "--prefill http://p:1"),
        ("--uncached-threshold", f"{PAIR} --routing-threshold 0", "--routing-threshold 1"),
        ("--prefill-timeout 9", TWO, "--prefill http://p:1"),
        ("--max-fallbacks 9", TWO, "--prefill http://p:1"),
        ("--max-fallback-tokens 9", TWO, "--prefill http://p:1"),
        ("--max-fallback-tokens 9", f"{PAIR} --max-fallbacks 0", "--max-fallbacks 1"),
        ("--ramp-up 9", "--prefill http://p:1 --decode http://d:1", "--decode http://d:2"),
        ("--ramp-up 9", "--engine http://e:1", "--engine http://e:2"),
        ("--ramp-up 9", "--engine http://e:1", "--discover-file engines.yaml"),
        ("--session-header x-user", PAIR, "--routing-strategy session"),
        ("--session-field user", PAIR, "--routing-strategy session"),
        ("--kv-events tcp://*:5557", PAIR, "--routing-strategy kvaware"),
        ("--kv-index-blocks 9", PAIR, "--routing-strategy kvaware"),
        ("--kv-block-size 32", f"{PAIR} --routing-strategy roundrobin", "--uncached-threshold"),
        ("--kv-block-size 32", f"{PAIR} --routing-strategy session", "--routing-strategy prefixaware"),
        ("--chat-template x.jinja", PAIR, "--model-path /m"),
        ("--chat-template-content-format string", PAIR, "--tokenizer /m"),
        ("--default-chat-template-kwargs {}", PAIR, FILES),
        ("--exclude-tools-when-tool-choice-none", PAIR, FILES),
        ("--max-model-len 9", PAIR, FILES),
        ("--counted-model m", PAIR, FILES),
        ("--count-in-process-bytes 9", PAIR, FILES),
        ("--count-cache-bytes 9", PAIR, FILES),
        ("--max-queue-size 9", PAIR, LIMIT),
        ("--overflow-status-code 503", PAIR, LIMIT),
        ("--queue-timeout 9", f"{PAIR} --max-queue-size 9", LIMIT),
        ("--queue-timeout 9", f"{PAIR} {LIMIT}", "--max-queue-size 9"),
        ("--cors-methods POST", PAIR, "--cors-origins *"),
        ("--cors-headers x-a", PAIR, "--cors-origins *"),
        ("--lmcache-receivers 1:2", PAIR, LMCACHE),
        ("--lmcache-notify 127.0.0.1:1", PAIR, LMCACHE),
        ("--lmcache-chunk-size 9", PAIR, LMCACHE),
        ("--lmcache-buffer-chunks 9", PAIR, LMCACHE),
        ("--lmcache-step-tokens 9", PAIR, LMCACHE),
        ("--notification-timeout 9", PAIR, LMCACHE),
        ("--reservation-timeout 9", PAIR, LMCACHE),
        ("--reservation-queue 9", PAIR, LMCACHE),
    ],
)
def test_a_flag_without_effect_is_told_by_its_name(flags: str, beside: str, makes_it_count: str) -> None:
    flag = flags.split()[0]
    told = without_effect(read([*beside.split(), *flags.split()]))
    assert [t for t in told if flag in t.partition(":")[0]], told
    more = makes_it_count.split()
    if more == LMCACHE.split():
        beside = ""
    if flag == "--lmcache-receivers":
        more = more[:-2]
    counts = without_effect(read([*beside.split(), *flags.split(), *more]))
    assert [t for t in counts if flag in t.partition(":")[0]] == []


@pytest.mark.parametrize("name", ["kv-event", "kv_events", "kv-replays", "kv-rank"])
def test_a_misspelt_place_of_events_is_no_label(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} would be a label; did you mean kv-"):
        engine_spec(f"http://a:1,{name}=tcp://*:5557")


def test_the_ports_may_be_alike_on_two_addresses_or_where_both_are_taken_as_they_come() -> None:
    read([*PAIR.split(), "--host", "10.0.0.1", "--port", "9", "--admin-port", "9"])
    read([*PAIR.split(), "--port", "0", "--admin-port", "0"])


def test_flags_that_lack_the_same_are_told_together() -> None:
    given = "--kv-events tcp://*:5557 --kv-replay tcp://*:6557 --kv-ranks 2"
    assert without_effect(read([*PAIR.split(), *given.split()])) == [
        "--kv-events, --kv-replay, --kv-ranks: no effect without --routing-strategy kvaware"
    ]
    own = ["--engine", "http://e:1,kv-events=tcp://*:5557"]
    assert without_effect(read(own)) == [
        "kv-events of single engines: no effect without --routing-strategy kvaware"
    ]
    assert without_effect(read([*own, "--routing-strategy", "kvaware"])) == []


@pytest.mark.parametrize("flags", [PAIR, LMCACHE, TWO, "--engine http://e:1", "--discover-file x"])
def test_a_plain_command_line_has_nothing_without_effect(flags: str) -> None:
    assert without_effect(read(flags.split())) == []
