"""Whatever text and shape a chat has, its ids are the engine's."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.prompt import PromptCounter

words = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", " ", "\n", "  ", "\r\n", "'ll", "1", "ß"]
    ),
)
contents = st.lists(words, max_size=6).map("".join)
parts = st.lists(contents.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": contents | parts},
    optional={"name": contents, "reasoning": contents},
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(turns, min_size=1, max_size=4)},
    optional={"add_generation_prompt": st.booleans(), "add_special_tokens": st.booleans()},
)


@pytest.mark.parametrize("name", ["smollm2", "qwen", "llama2 legacy", "unigram"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies)
def test_ids_are_the_engines(
    name: str, body: dict[str, Any], counters: dict[str, PromptCounter], oracle: Callable[..., Any]
) -> None:
    assert counters[name].chat(body).ids == oracle(name).chat(body)
