"""Whatever JSON a client sends in a field that the router reads: an answer, and no failure of the router."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem.router.classify import REFUSED_FIELDS

from .conftest import Endpoint, Start
from .fakes import local_counter

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
KEYS = TEXT | st.sampled_from(["role", "content", "type", "text", "image_url", "tool_calls", "transfer_id"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -1, 1, 1.0, "user", "text", "m", "auto", ""])
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3),
    max_leaves=6,
)
PARTS = st.lists(st.fixed_dictionaries({"type": VALUES}, optional={"text": VALUES}) | VALUES, max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": VALUES}, optional={"content": PARTS | VALUES, "tool_calls": VALUES})
    | VALUES,
    max_size=3,
)
# Not JSON that can be decoded, or only by some.
ODD = st.sampled_from(
    ["1e400", "-0", "1E2", '"\\ud800"', "[1e999]", '{"a":1,"a":2}', "[" * 2000 + "]" * 2000]
)

FIELDS = [
    "model",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "prompt",
    "prompt_embeds",
    "prompt_logprobs",
    "use_beam_search",
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "max_tokens",
    "max_completion_tokens",
    "vllm_xargs",
    *sorted(REFUSED_FIELDS),
]
ANY = st.dictionaries(
    st.sampled_from(FIELDS) | TEXT, VALUES.map(json.dumps) | ODD, min_size=1, max_size=4
) | MESSAGES.map(lambda messages: {"messages": json.dumps(messages)})


@pytest.fixture(params=["counted by engines", "counted here"])
async def endpoint(request: pytest.FixtureRequest, start: Start) -> Endpoint:
    return await start(local=local_counter() if request.param == "counted here" else None, explain=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), ANY)
@example("/v1/chat/completions", {"messages": '[{"role":"user","content":[{"type":["text"]}]}]'})
@example("/v1/chat/completions", {"messages": '[{"role":"user","content":[{"type":{}}]}]'})
@example("/v1/chat/completions", {"documents": '"x"', "chat_template_kwargs": "[1]"})
@example("/v1/completions", {"model": "[]"})
@example("/v1/completions", {"model": "1e400"})
@example("/v1/completions", {"truncate_prompt_tokens": "true"})
@example("/v1/completions", {"truncate_prompt_tokens": "1000000000000000000000000000000"})
@example("/v1/completions", {"vllm_xargs": '[["kv_transfer_params",1]]'})
async def test_any_json_in_any_field_gives_an_answer(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, str]
) -> None:
    caplog.clear()
    written: dict[str, Any] = {
        "prompt": json.dumps("a prompt that is longer than the threshold"),
        "messages": json.dumps([{"role": "user", "content": "a question longer than the threshold"}]),
        **fields,
    }
    body = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in written.items()) + "}"
    answer = await endpoint.post(body.encode(), path, x_tandem_explain="1")
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert not [r for r in caplog.records if r.exc_info]
    if REFUSED_FIELDS & fields.keys():
        assert answer.status_code == 400
