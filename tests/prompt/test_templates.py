"""Which template renders a chat, in which environment, and how its content format is told."""

# ruff: noqa: E501 - templates are not wrapped: line ends count in them

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tandem.prompt import BadPrompt, LoadError, NotExact, load
from tandem.prompt.template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]
LOOP = "{% for message in messages %}{{ message.content }}{% endfor %}"

SNIPPETS = [
    LOOP,
    "plain text",
    "{% for message in messages %}{% for part in message['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages[1:] %}{% for p in m.content[::-1] %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% set rest = messages[1:] %}{% set tail = rest %}{% for m in tail %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
    "{% set messages = messages %}{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m['contents'] %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m[content] %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in chat %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "{% for p in content %}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(c=m['content']) }}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.role) }}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.role) }}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(a, c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content, 1) }}{% endfor %}",
    "{% for key, value in messages %}{% for p in value.content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for a, b in m.content %}{% endfor %}{% endfor %}",
    "{% set a, b = messages, 1 %}{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{% endfor %}{% endfor %}",
    "{% for m in messages if m is defined %}{% generation %}{% for p in m.content %}{% break %}{% endfor %}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("source", SNIPPETS)
def test_the_content_format_is_told_as_the_engine_tells_it(source: str, oracle: Callable[..., Any]) -> None:
    oracle("smollm2")  # imports vLLM with its warnings kept quiet
    from vllm.renderers.hf import _detect_content_format

    assert ChatTemplate(source).content_format == _detect_content_format(source, default="string")


def test_both_content_formats_occur_among_the_snippets() -> None:
    assert {ChatTemplate(source).content_format for source in SNIPPETS} == {"string", "openai"}


def test_assignments_in_a_circle_end() -> None:
    circle = "{% set a = messages %}{% set b = a %}{% set a = b %}{% for m in a %}{% endfor %}"
    assert ChatTemplate(circle).content_format == "string"


@pytest.fixture
def a_model(model_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A model of one's own to change, without a chat template."""
    directory = copytree(model_dirs["llama3"], tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    return directory


def set_template(directory: Path, entry: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": entry}))


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("place", ["list", "dict", "files", "one string", "both"])
def test_the_template_comes_from_where_the_engine_takes_it(
    place: str, tools: Any, a_model: Path, oracle: Callable[..., Any]
) -> None:
    plain, for_tools = LOOP + " plain", LOOP + " {{ tools }} with tools"
    if place == "list":
        set_template(
            a_model, [{"name": "default", "template": plain}, {"name": "tool_use", "template": for_tools}]
        )
    elif place == "dict":
        set_template(a_model, {"default": plain, "tool_use": for_tools})
    else:
        set_template(a_model, plain)
    if place in ("files", "both"):
        (a_model / "additional_chat_templates").mkdir()
        (a_model / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
        (a_model / "chat_template.jinja").write_text(plain + " in a file")
    body = {"messages": HELLO, "tools": tools}
    assert load(a_model).chat(body).ids == oracle(a_model).chat(body)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_given_template_replaces_the_models(
    as_file: bool, model_dirs: dict[str, Path], tmp_path: Path, oracle: Callable[..., Any]
) -> None:
    given = LOOP + "\n{{ bos_token }}"
    path = tmp_path / "given.jinja"
    path.write_text(given)
    counter = load(model_dirs["llama3"], chat_template=str(path) if as_file else given)
    expected = oracle("llama3", chat_template=given).chat({"messages": HELLO})
    assert counter.chat({"messages": HELLO}).ids == expected


def test_a_given_template_that_is_no_file_is_an_error_that_names_it(model_dirs: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match=r"nowhere\.jinja.*Give a file"):
        load(model_dirs["llama3"], chat_template="nowhere.jinja")


@pytest.mark.parametrize("source", ["{% for message in %}", "{{ messages", "{% endfor %}", "{% unknown %}"])
def test_a_template_that_is_not_jinja_is_the_engines_to_render(
    source: str, model_dirs: dict[str, Path]
) -> None:
    counter = load(model_dirs["llama3"], chat_template=source)
    assert "not a Jinja template" in counter.inexact_chat
    with pytest.raises(NotExact, match="Jinja"):
        counter.chat({"messages": HELLO})
    assert counter.completion({"prompt": "Hello"}).count > 1


def test_a_model_without_a_template_still_counts_completions(a_model: Path) -> None:
    counter = load(a_model)
    with pytest.raises(NotExact, match="no chat template"):
        counter.chat({"messages": HELLO})
    assert counter.completion({"prompt": "Hello"}).count > 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ range(10**9) | list }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(
    source: str, model_dirs: dict[str, Path], oracle: Callable[..., Any], refused: type[Exception]
) -> None:
    with pytest.raises(BadPrompt):
        load(model_dirs["llama3"], chat_template=source).chat({"messages": HELLO})
    with pytest.raises(refused):
        oracle("llama3", chat_template=source).chat({"messages": HELLO})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ {'b': '<&>é', 'a': [1.0, none, true]} | tojson(indent=2, sort_keys=true) }}",
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
        "  {% for i in range(9) %}\n    {% if i == 3 %}{% continue %}{% endif %}\n  {{ i }}\n  {% endfor %}\n",
        "{% generation %}a{% endgeneration %}{{ undefined_name }}{{ messages[0].nothing }}",
    ],
)
def test_the_environment_is_the_engines(
    source: str, model_dirs: dict[str, Path], oracle: Callable[..., Any]
) -> None:
    counter, vllm = load(model_dirs["llama3"], chat_template=source), oracle("llama3", chat_template=source)
    assert counter.chat({"messages": HELLO}).ids == vllm.chat({"messages": HELLO})


@pytest.mark.parametrize(
    "source",
    [
        "{{ style }}{{ tone }}",
        "{% if messages | length > 5 %}{% set style = 'set' %}{% endif %}{{ style }}",
        "{% set style = style or 'default' %}{{ style }}",
        "{% if style is not defined %}{% set style = 'default' %}{% endif %}{{ style }}",
        "{% macro show(style) %}{{ style }}{% endmacro %}{{ show('given') }}{{ style }}",
        "{% for style in [1, 2] %}{{ style }}{% endfor %}{{ style }}",
        "{{ add_generation_prompt }} {{ continue_final_message }} {{ documents }} {{ tools }}",
        "{{ range }} {{ dict }} {{ bos_token }}",
    ],
)
def test_a_templates_arguments_are_those_that_the_engine_passes(
    source: str, model_dirs: dict[str, Path], oracle: Callable[..., Any]
) -> None:
    arguments = {"style": "terse", "tone": ["a", 1.5], "range": 5, "bos_token": "!", "unused": 1}
    body = {"messages": HELLO, "chat_template_kwargs": arguments}
    counter, vllm = load(model_dirs["llama3"], chat_template=source), oracle("llama3", chat_template=source)
    assert counter.chat(body).ids == vllm.chat(body)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no ' + messages[0].role) }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ [1] | tojson(indent='x', sort_keys=1, nonsense=2) }}",
    ],
)
def test_a_template_that_raises_gives_the_engines_message(
    source: str, model_dirs: dict[str, Path], oracle: Callable[..., Any], refused: type[Exception]
) -> None:
    with pytest.raises(BadPrompt) as ours:
        load(model_dirs["llama3"], chat_template=source).chat({"messages": HELLO})
    with pytest.raises(refused) as theirs:
        oracle("llama3", chat_template=source).chat({"messages": HELLO})
    assert ours.value.message == str(theirs.value).replace("_cached_compile_jinja_template.<locals>.", "_")


def test_the_date_comes_from_the_clock_that_was_given(model_dirs: dict[str, Path]) -> None:
    def ids(source: str) -> list[int]:
        counter = load(model_dirs["llama3"], chat_template=source, now=lambda: datetime(2031, 2, 3))
        return counter.chat({"messages": HELLO}).ids

    assert ids(LOOP + "{{ strftime_now('%d %b %Y') }}") == ids(LOOP + "{{ '03 Feb 2031' }}")
