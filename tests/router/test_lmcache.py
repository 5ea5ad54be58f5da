"""The lmcache connector without sockets: what each leg's body says, field by field, and when it is sent."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.config import RouterConfig
from tandem.config.router import receiver_ports
from tandem.http import Origin
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.connectors import LMCache, Receiver
from tandem.router.connectors.lmcache import SPACE_TAG, TAG, LMCacheAttempt
from tandem.router.engines import Engine, EngineRole

from .test_nixl import SAME, TOOLS

# On a busy machine an example may take long.
ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

APIS = pytest.mark.parametrize("api", list(Api))
URL = "http://10.0.0.8:8200"
DECODER = Engine(URL, EngineRole.DECODE, Origin.parse(URL))


def connector(ranks: int = 1, chunk_size: int = 256, buffer_chunks: int = 32) -> LMCache:
    def receiver(url: str) -> Receiver:
        assert url == URL
        return Receiver(
            "10.0.0.8", tuple(7300 + r for r in range(ranks)), tuple(7400 + r for r in range(ranks))
        )

    return LMCache(receiver, chunk_size=chunk_size, buffer_chunks=buffer_chunks, ranks=ranks)


def attempt(ranks: int = 1) -> LMCacheAttempt:
    return connector(ranks).attempt(DECODER)


def handed_over(ranks: int = 1) -> LMCacheAttempt:
    begun = attempt(ranks)
    begun.on_prefill_reply(b"{}")
    for _ in range(ranks):
        begun.on_notification()
    return begun


def client(**fields: Any) -> Body:
    return Body.parse(json.dumps(fields).encode())


def prefill(api: Api, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(attempt().prepare_prefill(api, client(**fields)))
    return body


def release(api: Api, **fields: Any) -> dict[str, Any]:
    text = attempt().prepare_release(api, client(**fields))
    assert text is not None
    body: dict[str, Any] = json.loads(text)
    return body


# The prefill leg


@APIS
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_prefill_leg_names_the_decoders_ports_and_the_hand_offs_tag(api: Api, ranks: int) -> None:
    begun = attempt(ranks)
    leg = json.loads(begun.prepare_prefill(api, client(prompt="x")))
    assert leg["kv_transfer_params"] == {
        "disagg_spec": {
            "req_id": begun.key,
            "receiver_host": "10.0.0.8",
            "receiver_init_port": list(range(7300, 7300 + ranks)),
            "receiver_alloc_port": list(range(7400, 7400 + ranks)),
        },
        TAG: begun.key,
    }


def test_the_prefill_leg_does_not_ask_for_the_first_token() -> None:
    """A prefill that is aborted with that field kills its engine, and the field counts even when false."""
    assert b"ret_first_tok" not in attempt().prepare_prefill(Api.CHAT, client(messages=[]))


@APIS
def test_the_prefill_leg_is_one_token_and_not_streamed(api: Api) -> None:
    """Each further token would leave a chunk on the decoder that nobody can free."""
    leg = prefill(api, prompt="x", stream=True, max_tokens=64, min_tokens=9, stop=["a"])
    assert (leg["max_tokens"], leg["min_tokens"], leg["stream"]) == (1, 1, False)
    assert leg.get("max_completion_tokens", 1) == 1
    assert "stop" not in leg


def test_every_attempt_has_a_tag_of_its_own() -> None:
    tags = {attempt().key for _ in range(100)}
    assert len(tags) == 100


def test_a_tag_has_only_characters_that_lmcache_keeps() -> None:
    """It splits keys at "@", and a failure there leaves the prefiller hanging."""
    assert re.fullmatch("[0-9a-f]{32}", attempt().key or "")


@APIS
def test_another_tag_stands_for_model_and_salt_on_every_leg(api: Api) -> None:
    """LMCache's keys have neither, and KV of one adapter is garbage to another."""

    def tag(**fields: Any) -> str:
        body, begun = client(prompt="x", **fields), handed_over()
        legs = (begun.prepare_prefill, begun.prepare_release, begun.prepare_decode)
        (found,) = {json.loads(leg(api, body) or b"")["kv_transfer_params"][SPACE_TAG] for leg in legs}
        assert re.fullmatch("[0-9a-f]{64}", found)
        return str(found)

    spaces = [{"model": "m"}, {"model": "n"}, {"cache_salt": "m"}, {"model": "m", "cache_salt": "b@%ä"}]
    assert len({tag(**fields) for fields in spaces}) == len(spaces)
    assert tag(model="m", seed=1) == tag(model="m", seed=2, cache_salt="")


# The order of things

EVENTS = st.integers(1, 8).flatmap(
    lambda ranks: st.permutations(["answer", *["notification"] * ranks]).map(lambda order: (ranks, order))
)


@ANY_TIME
@given(EVENTS)
def test_in_whatever_order_they_come_the_decode_leg_is_possible_once_and_behind_all(
    events: tuple[int, list[str]],
) -> None:
    ranks, order = events
    begun = attempt(ranks)
    body = client(prompt="x")
    for event in order:
        assert begun.missing is not None
        with pytest.raises(RuntimeError):
            begun.prepare_decode(Api.COMPLETIONS, body)
        if event == "answer":
            begun.on_prefill_reply(b"{}")
        else:
            begun.on_notification()
    assert begun.missing is None
    begun.prepare_decode(Api.COMPLETIONS, body)
    with pytest.raises(RuntimeError, match="once"):
        begun.prepare_decode(Api.COMPLETIONS, body)


@ANY_TIME
@given(EVENTS, st.data())
def test_without_any_one_of_them_there_is_no_decode_leg(
    events: tuple[int, list[str]], data: st.DataObject
) -> None:
    ranks, order = events
    begun = attempt(ranks)
    for event in order[: data.draw(st.integers(0, ranks))]:
        if event == "answer":
            begun.on_prefill_reply(b"{}")
        else:
            begun.on_notification()
    assert begun.missing is not None
    with pytest.raises(RuntimeError):
        begun.prepare_decode(Api.COMPLETIONS, client(prompt="x"))


def test_what_is_missing_is_told() -> None:
    begun = attempt(ranks=4)
    begun.on_notification()
    assert begun.missing == "the prefill leg's answer"
    begun.on_prefill_reply(b"anything")
    assert begun.missing == "3 of 4 notifications"


def test_behind_a_prefill_leg_that_failed_there_is_no_decode_leg_whatever_comes() -> None:
    begun = attempt()
    begun.on_prefill_failure()
    assert begun.missing == "1 of 1 notifications"
    begun.on_notification()
    assert begun.missing is None
    with pytest.raises(RuntimeError):
        begun.prepare_decode(Api.COMPLETIONS, client(prompt="x"))


@pytest.mark.parametrize("answer", [b"", b"null", b'{"kv_transfer_params": {"first_tok": 7}}', b"\xff"])
def test_the_prefill_legs_answer_may_say_anything(answer: bytes) -> None:
    begun = attempt()
    begun.on_notification()
    begun.on_prefill_reply(answer)
    assert begun.missing is None


# The decode leg


def test_the_decode_leg_is_the_clients_body_plus_the_tag() -> None:
    begun = handed_over()
    text = b'{"prompt":"x","temperature":0.10,"stream":true,"max_tokens":64,"seed":1E2,"stop":["a"]}'
    leg = begun.prepare_decode(Api.COMPLETIONS, Body.parse(text))
    assert leg == text[:-1] + b',"kv_transfer_params":{"%s":"%s"}}' % (TAG.encode(), str(begun.key).encode())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@ANY_TIME
@given(st.dictionaries(st.text("abcxyz_", min_size=1, max_size=8), VALUES, max_size=5))
def test_the_clients_fields_are_preserved_byte_for_byte(fields: dict[str, Any]) -> None:
    text = json.dumps(fields, separators=(",", ":")).encode()
    leg = handed_over().prepare_decode(Api.CHAT, Body.parse(text))
    assert leg.startswith(text[:-1])
    assert list(json.loads(leg)) == [*fields, "kv_transfer_params"]


# The release leg


@APIS
def test_the_release_leg_is_one_token_under_the_tag(api: Api) -> None:
    begun = attempt()
    leg = json.loads(
        begun.prepare_release(api, client(prompt="x", stream=True, max_tokens=64, min_tokens=9)) or b""
    )
    assert leg["kv_transfer_params"] == {TAG: begun.key}
    assert (leg["max_tokens"], leg["min_tokens"], leg["stream"]) == (1, 1, False)
    assert leg.get("max_completion_tokens") == (1 if api is Api.CHAT else None)


@APIS
@pytest.mark.parametrize("field", SAME)
def test_the_release_leg_has_the_same_prompt(api: Api, field: str) -> None:
    """Another prompt would not find the chunks."""
    assert release(api, **SAME)[field] == SAME[field]


@pytest.mark.parametrize("choice", ["none", "auto", "required", None])
def test_the_release_leg_keeps_what_tools_do_to_the_prompt(choice: str | None) -> None:
    """Engines may leave tools out of the prompt when none is to be called."""
    leg = release(Api.CHAT, messages=[], tools=TOOLS, tool_choice=choice)
    assert leg["tools"] == TOOLS
    assert leg["tool_choice"] == ("auto" if choice == "required" else choice)


@APIS
def test_an_engine_that_took_the_prefill_leg_takes_the_release_leg(api: Api) -> None:
    """A release that is rejected frees nothing, and holds its room for ever."""
    fields = {**SAME, "logprobs": 1, "response_format": {}, "stop": [], "tool_choice": "required", "n": 1}
    prefilled, released = prefill(api, **fields), release(api, **fields)
    del prefilled["kv_transfer_params"], released["kv_transfer_params"]
    assert prefilled == released


# What is reserved


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (100_000, 391)]
)
def test_a_prompt_takes_whole_chunks(tokens: int, chunks: int) -> None:
    (claim,) = connector(buffer_chunks=40).reservation(tokens, DECODER)
    assert (claim.engine, claim.resource, claim.amount, claim.capacity) == (
        DECODER,
        "receive_chunks",
        chunks,
        40,
    )


def test_each_rank_has_its_own_buffer_so_ranks_do_not_multiply_what_is_reserved() -> None:
    (claim,) = connector(ranks=4).reservation(512, DECODER)
    assert claim.amount == 2


def test_what_a_router_has_to_know_of_it() -> None:
    assert (LMCache.counts, LMCache.pushes, LMCache.survives_decoder_restart) == (True, True, False)


# The configuration

LMCACHE: dict[str, Any] = {
    "connector": "lmcache",
    "decode": ("http://a:1", "http://b:2"),
    "lmcache_buffer_chunks": 8,
    "lmcache_receivers": ("7300:7400",),
}


def test_one_pair_of_ports_is_for_all_decoders_on_their_own_hosts() -> None:
    config = RouterConfig(**LMCACHE)
    assert [config.receiver(url)[0] for url in config.decode] == ["a", "b"]
    assert {config.receiver(url)[1].alloc for url in config.decode} == {(7400,)}


def test_each_decoder_may_have_its_own_host_and_ports() -> None:
    config = RouterConfig(**{**LMCACHE, "lmcache_receivers": ("x:7300,7301:7400,7401", "7302:7402")})
    assert config.receiver("http://a:1") == ("x", receiver_ports("x:7300,7301:7400,7401"))
    assert config.receiver("http://b:2") == ("b", receiver_ports("7302:7402"))


def test_an_ipv6_decoder_is_named_without_brackets() -> None:
    config = RouterConfig(**{**LMCACHE, "decode": ("http://[::1]:8200",)})
    assert config.receiver("http://[::1]:8200")[0] == "::1"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lmcache_buffer_chunks": None}, "--connector lmcache: needs --lmcache-buffer-chunks"),
        ({"lmcache_receivers": ()}, "--connector lmcache: needs --lmcache-receivers"),
        ({"lmcache_receivers": ("h:1:2",)}, "--lmcache-receivers: 1 are given for 2 decode engines"),
        ({"lmcache_receivers": ("1:2",) * 3}, "--lmcache-receivers: 3 are given for 2 decode engines"),
    ],
)
def test_what_lmcache_needs_is_said_by_its_flag(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterConfig(**{**LMCACHE, **changes})


def test_nixl_needs_nothing_of_it() -> None:
    assert RouterConfig(decode=("http://a:1",)).connector == "nixl"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not .HOST:.INIT"),
        ("7300", "is not .HOST:.INIT"),
        ("7300:x", "'x' is not a port"),
        ("7300:0", "'0' is not a port"),
        ("7300:65536", "'65536' is not a port"),
        ("7300:²", "is not a port"),
        ("7300:", "'' is not a port"),
        ("7300,7301:7400", "has 2 init ports and 1 alloc ports"),
        (":7300:7400", "has an empty host"),
    ],
)
def test_bad_receivers_are_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        receiver_ports(text)
