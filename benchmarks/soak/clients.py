"""Clients that know every answer beforehand: short and long prompts, streamed and whole; some leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from promises import End, Exchange

from tandem.bench.chat import LIKELY
from tandem.bench.equality import compare
from tandem.bench.load import Prompts, ask, completion
from tandem.http import Client, ConnectFailed, HTTPClientError, Origin

TOKENS = 16
"""Of each answer."""
SHORT, LONG = (20, 120), (220, 600)
"""Tokens of prompts, from and to."""
PROMPTS = 12
"""Of each kind; every request has a salt of its own, so that no cache knows its prompt."""
LONG_SHARE, STREAM_SHARE, LEAVING_SHARE = 0.35, 0.5, 0.1
LONGEST = 400.0
"""Seconds after which an answer counts as none: beyond each deadline of the router."""
PATIENCE = 240.0
"""Seconds in which a client that is told to wait tries again."""
MODEL = "smollm2"


@dataclass(frozen=True)
class Known:
    """A prompt, and what an engine alone has answered: its tokens, and for each what was likely (ln)."""

    prompt: list[int]
    ids: list[int]
    likely: list[dict[int, float]]


@dataclass
class Answer:
    """What has come of one so far."""

    status: int = 0
    body: bytes = b""
    decoder: str | None = None
    """Its URL, where the answer names one."""
    retry_after: float | None = None

    @property
    def events(self) -> list[str]:
        return [e.removeprefix("data: ") for e in self.body.decode().split("\n\n")[:-1] if e]

    def ids(self, stream: bool) -> list[int]:
        if not stream:
            return list(json.loads(self.body)["choices"][0]["token_ids"])
        told = (json.loads(event) for event in self.events if event != "[DONE]")
        return [i for event in told for c in event.get("choices", ()) for i in c["token_ids"] or ()]


async def known(client: Client, decoder: Origin, seed: int) -> dict[bool, list[Known]]:
    """Prompts by whether they are long, with the answers that one engine gives to them."""
    rnd, prompts = random.Random(seed), Prompts(seed)
    found: dict[bool, list[Known]] = {False: [], True: []}
    for is_long, some in found.items():
        for _ in range(PROMPTS):
            prompt = prompts(rnd.randint(*(LONG if is_long else SHORT)))
            body = completion(
                MODEL, prompt, TOKENS, logprobs=LIKELY, return_token_ids=True, return_tokens_as_token_ids=True
            )
            choice = json.loads(await ask(client, decoder, "/v1/completions", body))["choices"][0]
            likely = [
                {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}
                for top in choice["logprobs"]["top_logprobs"]
            ]
            some.append(Known(prompt, choice["token_ids"], likely))
    return found


@dataclass
class Clients:
    """So many at once, each sending one request after another, until all are sent."""

    client: Client
    router: Origin
    prompts: dict[bool, list[Known]]
    requests: int
    seed: int
    now: Callable[[], float]
    names: Mapping[str, str]
    """Of engines, by URL."""
    exchanges: list[Exchange] = field(default_factory=list)
    ends: Counter[End] = field(default_factory=Counter)
    """Of whole requests: those that were told to wait were sent again."""
    _begun: int = 0

    async def run(self, at_once: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while self._begun < self.requests:
            self._begun += 1
            # Each request is the same in every run with this seed, whoever sends it.
            self.ends[await self._request(random.Random(f"{self.seed} {self._begun}"))] += 1

    async def _request(self, rnd: random.Random) -> End:
        is_long, stream = rnd.random() < LONG_SHARE, rnd.random() < STREAM_SHARE
        leaves_after = rnd.uniform(0.0, 3.0) if rnd.random() < LEAVING_SHARE else None
        which = rnd.choice(self.prompts[is_long])
        salt = f"{rnd.getrandbits(128):x}"
        body = completion(MODEL, which.prompt, TOKENS, stream=stream, cache_salt=salt, return_token_ids=True)
        first = self.now()
        while True:
            begun, answer = self.now(), Answer()
            end, detail = await self._exchange(body, which, answer, leaves_after)
            decoder = None if answer.decoder is None else self.names[answer.decoder]
            self.exchanges.append(Exchange(end, begun, self.now(), is_long, decoder, detail))
            if end not in (End.WAIT, End.AWAY) or self.now() - first > PATIENCE:
                return end
            await asyncio.sleep(min(answer.retry_after or 1.0, 5.0))

    async def _exchange(
        self, body: dict[str, Any], which: Known, answer: Answer, leaves_after: float | None
    ) -> tuple[End, str]:
        """One try: how it ended, and a word on that."""
        try:
            async with asyncio.timeout(LONGEST):
                async with asyncio.timeout(leaves_after) as leaving:
                    try:
                        await self._send(body, answer)
                    except ConnectFailed as error:
                        return End.AWAY, str(error)
                    except HTTPClientError as error:
                        return _torn(answer, str(error))
        except TimeoutError:
            return (End.LEFT, "") if leaving.expired() else (End.NONE, f"none in {LONGEST:g} s")
        return _judged(answer, which, bool(body["stream"]))

    async def _send(self, body: dict[str, Any], answer: Answer) -> None:
        headers = [(b"content-type", b"application/json"), (b"x-tandem-explain", b"1")]
        async with self.client.stream(
            self.router,
            "POST",
            b"/v1/completions",
            headers,
            json.dumps(body).encode(),
            head_timeout=2 * LONGEST,
            idle_timeout=2 * LONGEST,
            retry=False,
        ) as response:
            answer.status = response.status
            decoder, wait = response.header(b"x-tandem-decode-url"), response.header(b"retry-after")
            answer.decoder = decoder.decode() if decoder else None
            answer.retry_after = float(wait) if wait else None

            def take(data: bytes) -> None:
                answer.body += data

            await response.relay(take)


def _torn(answer: Answer, how: str) -> tuple[End, str]:
    """Of an answer whose connection broke."""
    last = answer.events[-2:]  # an engine's own error is followed by its [DONE]
    if answer.status == 200 and any(event.startswith('{"error"') for event in last):
        return End.BROKEN, last[0]
    return End.CUT, how


def _judged(answer: Answer, which: Known, stream: bool) -> tuple[End, str]:
    """Of an answer that came to its end."""
    if answer.status == 503 and answer.retry_after is not None:
        return End.WAIT, answer.body.decode()
    if answer.status != 200:
        return End.ERROR, f"HTTP {answer.status} {answer.body.decode()}"
    if stream and answer.events[-1:] != ["[DONE]"]:
        return End.HALF, str(answer.events[-1:])
    ids = answer.ids(stream)
    if len(ids) != TOKENS:
        return End.HALF, f"{len(ids)} tokens of {TOKENS}"
    same = compare(ids, which.ids, which.likely)
    return (End.RIGHT, "") if same.acceptable else (End.WRONG, str(same))
