"""Whatever JSON a client sends in a field that the router reads: an answer, and no failure of the router."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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

PATHS = ("/v1/completions", "/v1/chat/completions")
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
    "kv_transfer_params",
]
ANY = st.dictionaries(
    st.sampled_from(FIELDS), VALUES.map(json.dumps) | ODD, min_size=1, max_size=3
) | MESSAGES.map(lambda messages: {"messages": json.dumps(messages)})
OF_EACH_TYPE = [
    "null", "true", "-1", "1.5", "1e400", '"x"', "[]", "[[]]", "[{}]", "{}", '{"a":[]}',
    '{"kv_transfer_params":{}}', '[{"type":["text"]}]', '[{"content":[{"type":{}}]}]',
]  # fmt: skip


@pytest.fixture(params=["counted by engines", "counted here"])
async def endpoint(request: pytest.FixtureRequest, start: Start) -> Endpoint:
    return await start(local=local_counter() if request.param == "counted here" else None, explain=True)


async def answered(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, str]
) -> None:
    """Send a request with some fields, as written, in place of good ones."""
    caplog.clear()
    written: dict[str, str] = {
        "prompt": '"a prompt that is longer than the threshold"',
        "messages": '[{"role": "user", "content": "a question longer than the threshold"}]',
        **fields,
    }
    body = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in written.items()) + "}"
    answer = await endpoint.post(body.encode(), path, x_tandem_explain="1")
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert not [r for r in caplog.records if r.exc_info], body
    if "kv_transfer_params" in fields:
        assert answer.status_code == 400


async def test_any_type_in_any_field_gives_an_answer(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    for path in PATHS:
        for field in FIELDS:
            for value in OF_EACH_TYPE:
                await answered(endpoint, caplog, path, {field: value})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(PATHS), ANY)
@example("/v1/chat/completions", {"documents": '["x"]', "chat_template_kwargs": "[1]"})
async def test_any_json_in_any_fields_gives_an_answer(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, str]
) -> None:
    await answered(endpoint, caplog, path, fields)
