"""Which headers cross the router, and how requests are named."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Headers, Request, Responder
from tandem.router.headers import engine_request_id, request_id, to_client, to_engine

from .conftest import LONG, SHORT, Start
from .fakes import DONE, JSON, SSE, FakeEngine, Seen, broken, chunk


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request(
        method="POST",
        target=b"/v1/completions",
        path="/v1/completions",
        headers=list(headers),
        body=b"{}",
        http_version="1.1",
        client="127.0.0.1",
    )


@pytest.mark.parametrize("given_id", [b"a", b"req-1.2:3_X", b"x" * 128])
def test_a_clients_usable_id_is_kept(given_id: bytes) -> None:
    assert request_id(request((b"x-request-id", given_id))) == given_id.decode()


@pytest.mark.parametrize("given_id", [b"", b"x" * 129, b"a b", b"a\nb", b"\xc3\xa9", b"a/../b", b"a,b"])
def test_an_id_that_is_none_is_replaced_by_a_fresh_one(given_id: bytes) -> None:
    fresh = {request_id(request((b"x-request-id", given_id))) for _ in range(2)}
    assert len(fresh) == 2
    assert all(re.fullmatch(r"[0-9a-f]{32}", f) for f in fresh)


def test_two_ids_are_none() -> None:
    assert request_id(request((b"x-request-id", b"a"), (b"x-request-id", b"b"))) not in ("a", "b")
    assert request_id(request()) != request_id(request())


def test_engines_never_see_the_same_id_twice() -> None:
    """KV is keyed by it."""
    seen = {engine_request_id("r") for _ in range(100)}
    assert len(seen) == 100
    assert all(re.fullmatch(r"r-[0-9a-f]{16}", s) for s in seen)


def test_end_to_end_headers_reach_the_engine_with_the_legs_own_id() -> None:
    sent = request(
        (b"authorization", b"Bearer abc"),
        (b"traceparent", b"00-1-2-01"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
        (b"content-type", b"text/plain"),
        (b"accept-encoding", b"gzip"),
        (b"x-request-id", b"mine"),
        (b"x-tandem-explain", b"1"),
        (b"x-tandem-anything", b"1"),
        (b"connection", b"close, x-hop"),
        (b"x-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"proxy-authorization", b"secret"),
    )
    assert to_engine(sent, "mine-7") == [
        (b"authorization", b"Bearer abc"),
        (b"traceparent", b"00-1-2-01"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
        (b"content-type", b"application/json"),
        (b"x-request-id", b"mine-7"),
    ]


def test_an_answer_carries_the_clients_id_and_not_the_engines_own_business() -> None:
    headers: Headers = [
        (b"content-type", b"text/event-stream"),
        (b"date", b"now"),
        (b"server", b"uvicorn"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"keep-alive"),
        (b"x-request-id", b"mine-7"),
        (b"x-other", b"1"),
        (b"x-tandem-path", b"disaggregated"),
        (b"x-tandem-anything", b"1"),
    ]
    assert to_client(headers, "mine") == [
        (b"content-type", b"text/event-stream"),
        (b"x-other", b"1"),
        (b"x-request-id", b"mine"),
    ]


NAMES = st.sampled_from([b"x-a", b"x-tandem-x", b"x-request-id", b"content-type", b"te", b"x-b"])


@given(st.lists(st.tuples(NAMES, st.just(b"v"))))
def test_each_leg_has_one_id_and_one_type_and_nothing_that_is_only_the_routers(headers: Headers) -> None:
    sent = to_engine(request(*headers), "id")
    names = [name for name, _ in sent]
    assert names.count(b"x-request-id") == names.count(b"content-type") == 1
    assert set(names) <= {b"x-a", b"x-b", b"x-request-id", b"content-type"}
    assert names.count(b"x-a") == [n for n, _ in headers].count(b"x-a")


FORGED = [(b"x-tandem-path", b"forged"), (b"x-tandem-threshold", b"forged"), (b"x-kept", b"1")]


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["alone", "disaggregated"])
@pytest.mark.parametrize("status", [200, 400, 404, 422, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("explain", [False, True])
async def test_an_engine_cannot_speak_for_the_router(
    start: Start, body: dict[str, object], status: int, stream: bool, explain: bool
) -> None:
    def forge(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if status == 200 and (seen.kv or {}).get("do_remote_decode"):
            return False
        if status == 200 and stream:
            responder.start(200, [*SSE, *FORGED])
            responder.write(chunk("a"))
            responder.write(DONE)
            responder.finish()
        else:
            words = b'{"choices":[{"text":"x"}]}' if status == 200 else b'{"error":{"message":"no"}}'
            responder.send(status, [*JSON, *FORGED], words)
        return True

    endpoint = await start(explain=explain)
    for fake in (*endpoint.prefill, *endpoint.decode):
        fake.on_generate = forge
    answer = await endpoint.post({**body, "stream": stream}, x_tandem_explain="1")
    ours = {name: value for name, value in answer.headers.items() if name.startswith("x-tandem-")}
    assert "forged" not in ours.values()
    assert explain or not ours
    if answer.status_code == status:
        assert answer.headers["x-kept"] == "1"


async def test_what_clients_tell_the_router_is_not_told_to_engines(start: Start) -> None:
    endpoint = await start()
    await endpoint.post(LONG, x_tandem_explain="1", x_tandem_more="1", x_other="1")
    for fake in (*endpoint.prefill, *endpoint.decode):
        (seen,) = fake.requests
        assert [name for name in seen.headers if name.startswith("x-tandem-")] == []
        assert seen.headers["x-other"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("given_id", ["mine", "x" * 128])
async def test_a_client_gets_its_own_id_back_however_its_request_ends(
    start: Start, status: int, stream: bool, given_id: str
) -> None:
    endpoint = await start()
    if status != 200:
        endpoint.decode[0].on_generate = broken(status)
    for body in (SHORT, LONG):
        answer = await endpoint.post({**body, "stream": stream}, x_request_id=given_id)
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, [given_id])
    assert (await endpoint.post(b"{", x_request_id=given_id)).headers["x-request-id"] == given_id
    seen = [s.headers["x-request-id"] for e in (*endpoint.prefill, *endpoint.decode) for s in e.requests]
    assert len(set(seen)) == len(seen)
    assert all(re.fullmatch(rf"{given_id}-[0-9a-f]{{16}}", s) for s in seen)
