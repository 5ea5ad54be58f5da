"""Answers as vLLM 0.32 writes them: whole ones and the events of streams, field by field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.sim.protocol import Wanted
from tandem.sim.text import likelihoods
from tandem.sim.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder()


@dataclass(slots=True)
class Usage:
    """Tokens of an answer; `cached` None where the engine does not tell details."""

    prompt: int = 0
    completion: int = 0
    cached: int | None = None
    created: int = 0
    """Prompt tokens that entered the prefix cache."""

    def plain(self) -> dict[str, Any]:
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "total_tokens": total, "completion_tokens": self.completion}


@dataclass(slots=True)
class Piece:
    """Some tokens of one choice: what one event of a stream carries, or all of a choice."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    """The tokens before; only the last few count."""
    finish: str | None = None
    stop_reason: int | str | None = None
    prompt: list[int] | None = None
    """The prompt's ids, where they are to be returned."""
    offset: int = 0
    """Characters of the choice's text before this piece."""


class Renderer:
    """Writes the answer to one request."""

    def __init__(
        self,
        wanted: Wanted,
        vocabulary: Vocabulary,
        *,
        id: str,
        model: str,
        created: int,
        fingerprint: str,
        role: str,
        details: bool,
        force_usage: bool,
        tokens_as_ids: bool,
    ) -> None:
        self._wanted = wanted
        self._vocabulary = vocabulary
        self._id = id
        self._model = model
        self._created = created
        self._fingerprint = fingerprint
        self._role = role
        self._details = details
        self._usage = wanted.include_usage or force_usage
        self._as_ids = wanted.tokens_as_ids or tokens_as_ids
        kind = "chat.completion.chunk" if wanted.chat else "text_completion"
        head = {"id": id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _json.encode(head)[:-1] + b',"choices":['
        self._plain = not (wanted.continuous_usage or wanted.token_ids or wanted.logprobs is not None)
        if wanted.chat:
            self._rest = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            self._rest = (
                b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
                b'"token_ids":null}]}\n\n'
            )

    # Streams

    def role_event(self, index: int, prompt: Sequence[int]) -> bytes:
        """A chat's first event of a choice."""
        choice = {
            "index": index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        tail: dict[str, Any] = {}
        if self._wanted.continuous_usage:
            tail["usage"] = {**Usage(len(prompt)).plain(), "completion_tokens_details": None}
        tail["prompt_token_ids"] = list(prompt) if self._wanted.token_ids else None
        tail["prompt_text"] = None
        return self._event(choice, tail)

    def event(self, piece: Piece, usage: Usage) -> bytes:
        """One event of a choice; `usage` so far."""
        if self._plain and piece.finish is None and piece.prompt is None:  # nearly all: worth being fast
            text = _json.encode(piece.text)
            key = b'"delta":{"content":' if self._wanted.chat else b'"text":'
            return b'%b{"index":%d,%b%b%b' % (self._head, piece.index, key, text, self._rest)
        tail: dict[str, Any] = {}
        if self._wanted.continuous_usage:
            tail["usage"] = usage.plain()
            if self._wanted.chat:
                tail["usage"]["completion_tokens_details"] = None
        if piece.finish is not None and not self._usage:
            tail["system_fingerprint"] = self._fingerprint
        return self._event(self._stream_choice(piece), tail)

    def _stream_choice(self, piece: Piece) -> dict[str, Any]:
        ids = piece.tokens if self._wanted.token_ids else None
        logprobs = self._logprobs(piece)
        if self._wanted.chat:
            choice: dict[str, Any] = {
                "index": piece.index,
                "delta": {"content": piece.text},
                "logprobs": logprobs,
                "finish_reason": piece.finish,
            }
            if piece.finish is not None:
                choice["stop_reason"] = piece.stop_reason
            return {**choice, "token_ids": ids}
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": piece.prompt,
            "token_ids": ids,
        }

    def _event(self, choice: dict[str, Any], tail: dict[str, Any]) -> bytes:
        end = b"]," + _json.encode(tail)[1:] if tail else b"]}"
        return self._head + _json.encode(choice) + end + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        """What follows the last choice's end."""
        if not self._usage:
            return DONE
        told: dict[str, Any] = usage.plain()
        if self._details and usage.cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": usage.cached}
            if self._wanted.chat:
                told["prompt_tokens_details"]["created_cache_tokens"] = usage.created
        tail = {"usage": told, "system_fingerprint": self._fingerprint}
        return self._head + b"]," + _json.encode(tail)[1:] + b"\n\n" + DONE

    # Whole answers

    def whole(
        self, pieces: Sequence[Piece], usage: Usage, kv_params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The answer's JSON."""
        chat = self._wanted.chat
        choices = [self._whole_chat(p) if chat else self._whole_text(p) for p in pieces]
        details = None
        if self._details and usage.cached is not None:
            created = usage.created if chat else None
            details = {
                "cached_tokens": usage.cached,
                "created_cache_tokens": created,
                "multimodal_tokens": None,
            }
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": {
                **usage.plain(),
                "prompt_tokens_details": details,
                "completion_tokens_details": None,
            },
        }
        if chat:
            answer |= {
                "prompt_logprobs": None,
                "prompt_token_ids": pieces[0].prompt if self._wanted.token_ids else None,
                "prompt_text": None,
            }
        return {**answer, "kv_transfer_params": kv_params, "ec_transfer_params": None, "metrics": None}

    def _whole_chat(self, piece: Piece) -> dict[str, Any]:
        message = {
            "role": self._role,
            "content": piece.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": piece.index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.tokens if self._wanted.token_ids else None,
            "routed_experts": None,
        }

    def _whole_text(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.tokens if self._wanted.token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": piece.prompt if self._wanted.token_ids else None,
            "routed_experts": None,
        }

    # Log probabilities

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        count = self._wanted.logprobs
        if count is None:
            return None
        before = list(piece.context[-8:])
        entries = []
        for token in piece.tokens:
            before.append(token)
            entries.append(likelihoods(before, self._vocabulary.style.words, max(count, 1)))
        return (
            self._chat_logprobs(entries, count) if self._wanted.chat else self._text_logprobs(entries, piece)
        )

    def _chat_logprobs(self, entries: list[list[tuple[int, float]]], count: int) -> dict[str, Any]:
        content = []
        for likely in entries:
            token, logprob = likely[0]
            # vLLM gives the chosen token's own bytes, but those of the name where tokens are named by id.
            content.append(
                {
                    "token": self._name(token),
                    "logprob": logprob,
                    "bytes": list(self._vocabulary.text(token).encode()),
                    "top_logprobs": [
                        {"token": name, "logprob": value, "bytes": list(name.encode())}
                        for name, value in ((self._name(t), v) for t, v in likely[:count])
                    ],
                }
            )
        return {"content": content}

    def _text_logprobs(self, entries: list[list[tuple[int, float]]], piece: Piece) -> dict[str, Any]:
        names = [self._name(likely[0][0]) for likely in entries]
        offsets, offset = [], piece.offset
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [likely[0][1] for likely in entries],
            "tokens": names,
            "top_logprobs": [{self._name(t): v for t, v in likely} for likely in entries],
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._vocabulary.text(token)


def error_event(error: dict[str, Any]) -> bytes:
    """An error inside a stream: vLLM writes it with spaces, unlike other events."""
    return b"data: " + json.dumps(error).encode() + b"\n\n"
