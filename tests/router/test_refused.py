"""What clients cannot do through a router: smuggle, leave the allow-list, speak for it, or hide from it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tandem.http import Responder

from ..http.messages import LIMITS, REFUSED
from .conftest import LONG, SHORT, Start
from .fakes import FakeEngine, Seen, completion

BODY = json.dumps(SHORT).encode()
FRAMING = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
WHOLE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + FRAMING


async def test_nothing_of_a_message_that_is_refused_or_behind_it_reaches_an_engine(start: Start) -> None:
    endpoint = await start(max_head_bytes=LIMITS.head_bytes, max_body_bytes=LIMITS.body_bytes)

    async def answer(data: bytes) -> bytes:
        # Those that seem unfinished are continued by what is smuggled.
        return await endpoint.raw(data.replace(b" / HTTP", b" /v1/completions HTTP") + WHOLE)

    names = [name for name in REFUSED if name != "too-many-sent-ahead"]
    for first in range(0, len(names), 20):
        some = names[first : first + 20]
        answers = await asyncio.gather(*(answer(REFUSED[name][0]) for name in some))
        for name, got in zip(some, answers, strict=True):
            assert got.startswith(b"HTTP/1.1 %d " % REFUSED[name][1]), name
            assert got.count(b"HTTP/1.1 ") == 1, name
    assert endpoint.decode[0].requests == []
    assert await endpoint.outcomes() == {}


@pytest.mark.parametrize(
    "target",
    [
        "/v1/%63ompletions",
        "/v1%2Fcompletions",
        "/v1/completions%00",
        "/v1/completions%3F",
        "/v1/./completions",
        "/v1/x/../completions",
        "/v1/%2e%2e/v1/completions",
        "/../v1/completions",
        "//v1/completions",
        "///127.0.0.1:1/v1/completions",
        "/v1/completions/",
        "/v1/completions;x",
        "/v1/Completions",
        "\\v1\\completions",
        "http://x/v1/completions",
        "http://127.0.0.1:1/v1/completions",
        "HTTP://x@y/v1/completions",
        "https://x",
        "*",
        "/sleep",
        "/v1/completions/../../sleep",
        "/v1/completions/%2e%2e/%2e%2e/sleep",
    ],
)
async def test_only_a_path_as_it_is_spelled_here_is_served(start: Start, target: str) -> None:
    endpoint = await start()
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
    got = await endpoint.raw(head + FRAMING)
    assert got.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert endpoint.decode[0].requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize(
    "said",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; x=application/json",
        "application/json, text/plain",
        "application/jsonlines",
        "",
    ],
)
async def test_a_body_that_is_not_said_to_be_json_is_refused_before_it_is_looked_at(
    start: Start, path: str, said: str | None
) -> None:
    """As vLLM refuses it. A page in a browser may have such a body sent without asking the router first."""
    endpoint = await start()
    headers = {} if said is None else {"content-type": said}
    for body in (BODY, b"no JSON"):
        answer = await endpoint.client.post(path, content=body, headers=headers)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        found = "is missing" if said is None else f"is {said!r}"
        assert error["message"] == f"The header Content-Type {found}; send Content-Type: application/json."
    assert endpoint.decode[0].requests == []
    assert await endpoint.outcomes() == {("none", "invalid", "rejected"): 2.0}


@pytest.mark.parametrize(
    "said", ["Application/JSON", "application/json; charset=utf-8", "application/json ;a=b"]
)
async def test_json_may_be_spelled_as_media_types_are(start: Start, said: str) -> None:
    endpoint = await start()
    assert (await endpoint.post(SHORT, content_type=said)).status_code == 200


@pytest.mark.parametrize("target", ["127.0.0.1:1", "x:443", "/v1/completions"])
async def test_the_router_is_no_tunnel(start: Start, target: str) -> None:
    endpoint = await start()
    got = await endpoint.raw(f"CONNECT {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert got.startswith((b"HTTP/1.1 501 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize("name", ["X-Data-Parallel-Rank", "x-prefiller-host-port", "X-Tandem-Canary"])
async def test_a_header_that_is_the_routers_is_refused_also_where_it_is_called_hop_by_hop(
    start: Start, name: str
) -> None:
    endpoint = await start()
    answer = await endpoint.client.post(
        "/v1/completions", json=SHORT, headers={name: "0", "connection": name.lower()}
    )
    assert answer.status_code == 400
    assert endpoint.decode[0].requests == []


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["alone", "disaggregated"])
async def test_hop_by_hop_headers_cross_in_neither_direction(start: Start, body: dict[str, object]) -> None:
    endpoint = await start()

    def answers(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if (seen.kv or {}).get("do_remote_decode"):
            return False
        # Past the responder, which would drop them: engines are not ours.
        told = json.dumps(completion("x")).encode()
        responder._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: keep-alive, X-Hop\r\n"
            b"x-hop: 1\r\nkeep-alive: timeout=1\r\nproxy-authenticate: x\r\ntrailer: x-late\r\n"
            b"upgrade: h2c\r\nx-end: 1\r\ntransfer-encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\nx-late: 1\r\n\r\n" % (len(told), told)
        )
        responder.started = responder.finished = True
        return True

    endpoint.decode[0].on_generate = answers
    sent = json.dumps(body).encode()
    got = await endpoint.raw(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close, X-Mine\r\nx-mine: 1\r\n"
        b"content-type: application/json\r\n"
        b"te: trailers\r\nproxy-authorization: secret\r\nproxy-connection: x\r\n"
        b"keep-alive: timeout=9\r\ntrailer: x-late\r\n"
        b"x-end: 1\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-late: 1\r\n\r\n"
        % (len(sent), sent)
    )
    head, _, rest = got.partition(b"\r\n\r\n")
    assert json.loads(rest)["choices"][0]["text"] == "x"
    fields = {line.partition(b":")[0] for line in head.split(b"\r\n")[1:]}
    assert fields == {b"content-type", b"x-end", b"x-request-id", b"date", b"content-length", b"connection"}
    for fake in (*endpoint.decode, *(endpoint.prefill if body is LONG else [])):
        (seen,) = fake.requests
        assert set(seen.headers) == {"host", "x-end", "content-type", "x-request-id", "content-length"}


async def test_an_id_that_engines_would_read_an_address_from_is_replaced(start: Start) -> None:
    endpoint = await start()
    forged = "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_x"
    answer = await endpoint.post(SHORT, x_request_id=forged)
    (seen,) = endpoint.decode[0].requests
    assert "addr" not in seen.headers["x-request-id"]
    assert "addr" not in answer.headers["x-request-id"]
