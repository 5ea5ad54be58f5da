"""A chat request to any endpoint that speaks OpenAI's API, and the events of its streamed answer.

What comes is bounded: an event, an error's body, and the answer as a whole.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

EVENT_BYTES = 1 << 20
ANSWER_BYTES = 64 << 20
"""Longest event, and longest answer with all that is told about its tokens."""
_BODY_BYTES = 4 << 20  # of a list of models, or an error
_SHOWN = 500  # characters of an endpoint's own words

# As finish_reason: the engine failed although the stream looks whole.
_FAILED = ("abort", "error")


class RequestFailed(Exception):
    """The endpoint answered with an error, or not as asked; the message holds it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: the HTTP status, where it is that which says so."""
        super().__init__(message)
        self.status = status


class ChatStream:
    """An answer that has begun. `headers` are its response's."""

    def __init__(self, url: str, response: httpx.Response) -> None:
        self._url = url
        self._response = response
        self.headers: Mapping[str, str] = response.headers

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Each event as it comes; ends where the answer has ended well.

        Raises RequestFailed for an error event or a stream that stops too early, httpx.HTTPError when the
        connection breaks."""
        ended = False
        async for payload in self._data():
            if payload == b"[DONE]":
                ended = True
                continue
            event = self._event(payload)
            ended = ended or any(choice.get("finish_reason") for choice in choices_of(event))
            yield event
        if not ended:
            raise RequestFailed(f"{self._url} ended its stream in the middle of the answer")

    def _event(self, payload: bytes) -> dict[str, Any]:
        event = _object(payload)
        if event is None:
            shown = payload[:_SHOWN].decode("utf-8", "replace")
            raise RequestFailed(f"{self._url} sent an event that is no JSON object: {shown}")
        if event.get("error") or event.get("object") == "error":
            raise RequestFailed(f"{self._url} ended its stream with an error: {message_of(payload)}")
        for choice in choices_of(event):
            if choice.get("finish_reason") in _FAILED:
                why = choice["finish_reason"]
                raise RequestFailed(f"{self._url} broke its answer off: the engine says {why!r}")
        return event

    async def _data(self) -> AsyncIterator[bytes]:
        """What stands after `data:`. Lines end with LF or CRLF and with nothing else: in JSON text there may
        be characters at which Python would split lines, too."""
        partial = bytearray()
        size = 0
        async for chunk in self._response.aiter_bytes():
            size += len(chunk)
            if size > ANSWER_BYTES:
                raise RequestFailed(f"{self._url} sent more than {ANSWER_BYTES >> 20} MiB")
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                if data := _data_of(bytes(partial) + line):
                    yield data
                partial.clear()
            partial += rest
            if len(partial) > EVENT_BYTES:
                raise RequestFailed(f"{self._url} sent an event of more than {EVENT_BYTES >> 20} MiB")
        if data := _data_of(bytes(partial)):
            yield data


def _data_of(line: bytes) -> bytes:
    return line[5:].strip() if line.startswith(b"data:") else b""


def choices_of(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An event's choices, without what is none."""
    choices = event.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def delta_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What a choice adds to the message."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {}


@asynccontextmanager
async def chat_stream(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> AsyncIterator[ChatStream]:
    """POST a chat request as a stream; `url` is what stands before `/v1`. Leaving the block early closes the
    connection: the endpoint sees the request cancelled.

    Raises RequestFailed for any status but 200, httpx.HTTPError when there is no answer."""
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=request, headers=headers) as response:
        if response.status_code != 200:
            said = message_of(await _body(response))
            raise RequestFailed(f"{url} answered HTTP {response.status_code}: {said}", response.status_code)
        yield ChatStream(url, response)


async def served_models(client: httpx.AsyncClient, url: str) -> list[str]:
    """The names in an endpoint's /v1/models. Raises RequestFailed where it tells none, httpx.HTTPError when
    there is no answer."""
    async with client.stream("GET", f"{url}/v1/models") as response:
        body = await _body(response)
        if response.status_code == 404 and _object(body) is None:
            raise RequestFailed(f"{url} is no OpenAI endpoint: it has no /v1/models (HTTP 404)", 404)
        if response.status_code != 200:
            raise RequestFailed(
                f"{url}/v1/models answered HTTP {response.status_code}: {message_of(body)}",
                response.status_code,
            )
    cards = (_object(body) or {}).get("data")
    if not isinstance(cards, list):
        shown = body[:100].decode("utf-8", "replace")
        raise RequestFailed(f"{url} is no OpenAI endpoint: to /v1/models it answers {shown!r}")
    names = [str(card["id"]) for card in cards if isinstance(card, dict) and card.get("id")]
    if not names:
        raise RequestFailed(f"{url}/v1/models names no model; is the endpoint ready?")
    return names


def message_of(body: bytes) -> str:
    """An endpoint's own words: the message of an error in OpenAI's form, or one of the forms near it, else
    the text as it is."""
    told: Any = _object(body) or {}
    for name in ("error", "message", "detail"):
        if isinstance(told, dict) and told.get(name):
            told = told[name]
    text = told if isinstance(told, str) and told else body.decode("utf-8", "replace").strip()
    return text[:_SHOWN] or "without a word"


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def _body(response: httpx.Response) -> bytes:
    """An answer's body, as far as it is looked at."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _BODY_BYTES:
            break
    return bytes(body[:_BODY_BYTES])
