"""What is counted here, and what an engine is asked to count, is what it counts when it answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.http import Client, Origin
from tandem.prompt import BadPrompt, NotExact, PromptCounter
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting import Counter
from tandem.router.engines import Engine, EngineRole
from tandem.router.fleet import Fleet
from tandem.router.legs import Legs

from ..prompt import corpus, generated
from .conftest import Up

LONGEST = 300
"""Tokens of a prompt in the sample: engines on CPU compute some five hundred a second."""


def sample(counter: PromptCounter) -> list[tuple[Api, dict[str, Any], int]]:
    """Requests of the corpus, each with its tokens as counted here."""
    found = []
    chats = [*corpus.CONVERSATIONS.values(), *generated.chats(corpus).values()]
    for api, bodies in (
        (Api.CHAT, chats[::3]),
        (Api.COMPLETIONS, list(generated.completions(corpus).values())[::3]),
    ):
        for body in bodies:
            body = {name: value for name, value in body.items() if name not in ("model", "echo")}
            if body.get("tools"):
                body["tool_choice"] = (
                    "none"  # the engines parse no calls; the tools are in the prompt all the same
                )
            try:
                tokens = counter.chat(body) if api is Api.CHAT else counter.completion(body)
            except (NotExact, BadPrompt):
                continue
            if tokens.count <= LONGEST:
                found.append((api, body, tokens.count))
    return found


async def test_prompts_have_the_tokens_that_the_engine_counts(
    smollm2: Up, client: httpx.AsyncClient, counter: PromptCounter, caplog: pytest.LogCaptureFixture
) -> None:
    url = smollm2.decode[0]
    http, fleet = Client(), Fleet()
    decoder = Engine(url, EngineRole.DECODE, Origin.parse(url))
    fleet.add(decoder)
    fleet.prove(decoder, (await client.get(f"{url}/v1/models")).json()["data"])
    legs = Legs(http, RouterConfig(decode=(url,)))
    asks = Counter(None, legs, fleet)
    requests = sample(counter)
    assert len(requests) >= 60
    try:
        await Counter(counter, legs, fleet).check(decoder, fleet.models[0]["id"])
        assert not caplog.records, "the router's own check at its start finds the same ids"
        for api, body, tokens in requests:
            answer = await client.post(
                url + api.value, json={**body, "max_tokens": 1, "max_completion_tokens": None}
            )
            assert answer.status_code == 200, (body, answer.text)
            assert answer.json()["usage"]["prompt_tokens"] == tokens, body
            asked = await asks.count(api, Body.parse(json.dumps(body).encode()))
            assert asked.tokens == tokens, f"/tokenize: {body}"
    finally:
        await http.aclose()


@pytest.mark.parametrize("size", [70_000, 300])
async def test_a_disaggregated_prompt_has_the_tokens_that_were_counted(
    always: str, client: httpx.AsyncClient, size: int
) -> None:
    """Bodies over 64 KiB are counted in the router's counting process."""
    content = "\n".join(corpus.PANGRAMS.values())
    body = {
        "messages": [{"role": "user", "content": content[:300]}],
        "max_tokens": 1,
        "user": "u" * size,
    }
    answer = await client.post(f"{always}/v1/chat/completions", json=body, headers={"x-tandem-explain": "1"})
    assert answer.headers["x-tandem-path"] == "disaggregated"
    assert answer.headers["x-tandem-prompt-tokens"] == str(answer.json()["usage"]["prompt_tokens"])
