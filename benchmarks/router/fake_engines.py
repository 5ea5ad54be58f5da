"""Prefill and decode engines that cost next to nothing: they answer as vLLM does, without computing.

    python fake_engines.py PREFILL_PORTS DECODE_PORTS        (each a list in JSON)

A prefiller's answer is one token with NIXL's hand-off parameters, a decoder's a stream whose tokens come all
at once or at a pace. Each line on the standard input is JSON that sets `tokens` and `interval` (seconds; 0:
all at once) of the answers that begin after it. It is answered with a line of JSON: what came since the last
one (`Asked`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import cast

import uvloop

MODEL = "m"
TOKEN = " tok"
TOKENS = 64
"""Of an answer, until something else is set."""
PROMPT_BLOCKS = 128
"""KV blocks that a prefiller says it holds of each prompt."""
BACKLOG = 4096
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAMS = re.compile(rb'"stream": *true')
_CHAT = b"/v1/chat/completions"
_USUAL = b"date: Mon, 01 Jan 2035 00:00:00 GMT\r\nserver: uvicorn\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\n"
    + _USUAL
    + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LAST = b"0\r\n\r\n"


@dataclass
class Asked:
    """Requests since the last look, and what is open now."""

    prefills: int = 0
    handed_over: int = 0
    """Decode legs with hand-off parameters."""
    alone: int = 0
    open: int = 0
    """Streams."""
    most_open: int = 0


@dataclass
class Answers:
    """What streams consist of."""

    tokens: int = TOKENS
    interval: float = 0.0
    first: bytes = b""
    """The role and the first token, which vLLM sends one after the other."""
    next: bytes = b""
    rest: bytes = b""
    """The last token, and the end."""
    whole: bytes = b""
    asked: Asked = field(default_factory=Asked)

    def set(self, tokens: int, interval: float) -> None:
        self.tokens, self.interval = tokens, interval
        self.first = _STREAM_HEAD + _event({"role": "assistant", "content": ""}) + _event({"content": TOKEN})
        self.next = _event({"content": TOKEN})
        end = _event({"content": TOKEN}, "length") + _chunk(b"data: [DONE]\n\n") + _LAST
        self.rest = end
        self.whole = self.first + self.next * (tokens - 2) + end


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": None}
    event = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return _chunk(b"data: " + _json({**event, "choices": [choice]}) + b"\n\n")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _page(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, _USUAL, kind, len(body)) + body


_PAGES = {
    b"/health": _page(b""),
    b"/v1/models": _page(
        _json({"object": "list", "data": [{"id": MODEL, "owned_by": "vllm", "max_model_len": 131_072}]})
    ),
    b"/version": _page(_json({"version": "0.32.0"})),  # by this and the owner smg takes them for vLLM
    b"/metrics": _page(b"process_start_time_seconds 1.0\n", b"text/plain"),
}
_NOT_FOUND = _page(b'{"detail":"Not Found"}', status=b"404 Not Found")
_HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(PROMPT_BLOCKS))],
    "remote_engine_id": "1c8c0f3e-2f0b-4c5f-9a0e-6f1d2f1c8c0f",
    "remote_request_id": "cmpl-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def _one_token(chat: bool, handoff: dict[str, object] | None) -> bytes:
    message = {"message": {"role": "assistant", "content": TOKEN}} if chat else {"text": TOKEN}
    choice = {"index": 0, **message, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    kind = "chat.completion" if chat else "text_completion"
    answer = {"id": "cmpl-0", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}
    return _page(_json({**answer, "usage": usage, "kv_transfer_params": handoff}))


_ALONE = {chat: _one_token(chat, None) for chat in (True, False)}
_PREFILLED = {chat: _one_token(chat, _HANDOFF) for chat in (True, False)}


class Engine(asyncio.Protocol):
    """One connection to an engine. A request comes whole before the next one, as from every router here."""

    def __init__(self, answers: Answers, prefills: bool) -> None:
        self._answers = answers
        self._prefills = prefills
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._call_at = asyncio.get_running_loop().call_at

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._answers.asked.open -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer = data = self._buffer + data if self._buffer else data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return
        found = _LENGTH.search(data, 0, end)
        if len(data) < end + 4 + (int(found[1]) if found else 0):
            return
        self._buffer = b""
        target = data[: data.index(b"\r\n")].split(b" ")[1].partition(b"?")[0]
        if data.startswith(b"GET"):
            self._transport.write(_PAGES.get(target, _NOT_FOUND))
        else:
            self._answer(target, data[end:])

    def _answer(self, target: bytes, body: bytes) -> None:
        answers, chat = self._answers, target == _CHAT
        if self._prefills:
            answers.asked.prefills += 1
            self._transport.write(_PREFILLED[chat])
            return
        if b'"remote_block_ids":[' in body:
            answers.asked.handed_over += 1
        else:
            answers.asked.alone += 1
        if not _STREAMS.search(body):
            self._transport.write(_ALONE[chat])
        elif answers.interval == 0.0:
            self._transport.write(answers.whole)
        else:
            answers.asked.open += 1
            answers.asked.most_open = max(answers.asked.most_open, answers.asked.open)
            self._transport.write(answers.first)
            due = asyncio.get_running_loop().time() + answers.interval
            self._next(due, answers.tokens - 1, answers.interval)

    def _next(self, due: float, left: int, interval: float) -> None:
        self._timer = self._call_at(due, self._send, due, left, interval)

    def _send(self, due: float, left: int, interval: float) -> None:
        if left > 1:
            self._transport.write(self._answers.next)
            self._next(due + interval, left - 1, interval)
        else:
            self._timer = None
            self._answers.asked.open -= 1
            self._transport.write(self._answers.rest)


async def main(prefill: list[int], decode: list[int]) -> None:
    answers = Answers()
    answers.set(TOKENS, 0.0)
    loop = asyncio.get_running_loop()
    for port in (*prefill, *decode):
        await loop.create_server(
            lambda prefills=port in prefill: Engine(answers, prefills),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=BACKLOG,
        )
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(flush=True)
    while line := await lines.readline():
        if setting := json.loads(line):
            answers.set(**setting)
        print(json.dumps(asdict(answers.asked)), flush=True)
        still = answers.asked.open
        answers.asked = Asked(open=still, most_open=still)


if __name__ == "__main__":
    gc.disable()  # its pauses would be the router's
    uvloop.run(main(*map(json.loads, sys.argv[1:])))
