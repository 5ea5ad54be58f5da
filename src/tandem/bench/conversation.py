"""A chat of several turns with an endpoint, each answer with its figures by the client's clock."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem.bench.stream import RequestFailed, chat_stream, choices_of, delta_of

# What a router answers with the path that a request took (`router/explain.py`).
_EXPLAIN = {"x-tandem-explain": "1"}


@dataclass
class Answer:
    """An answer, whole or as far as it came. Times are seconds since the request was sent."""

    text: str = ""
    finish_reason: str | None = None
    """None: it was not ended by the model."""
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Tokens as the endpoint counts them; None where it does not tell."""
    times: list[float] = field(default_factory=list)
    """When each piece of text came: a token, as a rule."""

    @property
    def path(self) -> str | None:
        """`disaggregated` or `decode_only`; None where the endpoint does not tell."""
        return self.headers.get("x-tandem-path")

    @property
    def reason(self) -> str | None:
        """Why it went there, in the router's words."""
        return self.headers.get("x-tandem-reason")

    @property
    def ttft(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Between one piece of text and the next: ITL, where each is a token."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: tokens after the first, over the time since it. None of fewer than two."""
        tokens = self.completion_tokens or len(self.times)
        span = self.times[-1] - self.times[0] if self.times else 0.0
        return (tokens - 1) / span if tokens > 1 and span > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`; what is not known is None."""
        gaps = self.gaps
        rate = self.tokens_per_second
        return {
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "path": self.path,
            "reason": self.reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": _ms(self.ttft),
            "itl_p50_ms": _ms(statistics.median(gaps)) if gaps else None,
            "itl_max_ms": _ms(max(gaps, default=None)),
            "tokens_per_s": None if rate is None else round(rate, 2),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


class Conversation:
    """The messages so far. `url` is what stands before `/v1`; `settings` go into every request (`max_tokens`,
    `temperature`)."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        model: str,
        *,
        system: str | None = None,
        settings: Mapping[str, Any] | None = None,
        patience: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`patience`: seconds without a piece of text after which an answer is given up, whatever else comes
        meanwhile."""
        self.system = system
        self.last = Answer()
        """The latest answer, also one that did not come to its end."""
        self._client = client
        self._url = url
        self._model = model
        self._settings = dict(settings or {})
        self._patience = patience
        self._clock = clock
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the next question is appended to."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self._turns.clear()

    async def ask(
        self,
        question: str,
        *,
        on_text: Callable[[str], None] = lambda text: None,
        on_thought: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Send a question and take its answer as it comes; `on_thought` gets what a reasoning model thinks
        first, which is not sent back to it.

        A turn that fails is taken back. One that is cancelled in the middle of its answer stays, with what
        was said. Raises RequestFailed, or httpx.HTTPError when the connection breaks.
        """
        asked = {"role": "user", "content": question}
        body = {"model": self._model, "messages": [*self.messages, asked], **self._settings}
        answer = self.last = Answer()
        sent = self._clock()
        try:
            async with (
                asyncio.timeout(self._patience) as limit,
                chat_stream(self._client, self._url, body, _EXPLAIN) as stream,
            ):
                answer.headers = stream.headers
                async for event in stream.events():
                    _count(answer, event.get("usage"))
                    for choice in choices_of(event):
                        delta = delta_of(choice)
                        text = _text(delta, "content")
                        thought = _text(delta, "reasoning") or _text(delta, "reasoning_content")
                        if text or thought:
                            answer.times.append(self._clock() - sent)
                            limit.reschedule(asyncio.get_running_loop().time() + self._patience)
                        answer.text += text
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                        if thought:
                            on_thought(thought)
                        if text:
                            on_text(text)
        except asyncio.CancelledError:
            if answer.text:
                self._keep(asked, answer)
            raise
        except TimeoutError:
            raise RequestFailed(
                f"{self._url} has sent no text for {self._patience:g} s; the request was given up"
            ) from None
        self._keep(asked, answer)
        return answer

    def _keep(self, asked: dict[str, str], answer: Answer) -> None:
        self._turns += [asked, {"role": "assistant", "content": answer.text}]


def _text(delta: Mapping[str, Any], name: str) -> str:
    value = delta.get(name)
    return value if isinstance(value, str) else ""


def _count(answer: Answer, usage: Any) -> None:
    if isinstance(usage, dict):
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        answer.prompt_tokens = prompt if isinstance(prompt, int) else answer.prompt_tokens
        answer.completion_tokens = completion if isinstance(completion, int) else answer.completion_tokens
