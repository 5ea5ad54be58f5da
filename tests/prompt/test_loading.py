"""Tokenizer directories: odd ones are read as the engine reads them, unusable ones get a useful error."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tandem.prompt import LoadError, NotExact, families, load, messages, model_types

HELLO = {"messages": [{"role": "user", "content": "Hello <x> <y> <image> [A] <s>"}]}


@pytest.fixture
def a_model(model_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A model of one's own to change."""
    return copytree(model_dirs["unigram"], tmp_path / "model")


def change(path: Path, **values: object) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    document |= values
    path.write_text(json.dumps({key: value for key, value in document.items() if value != "DELETE"}))


def token(content: str, **flags: bool) -> dict[str, object]:
    return {
        "content": content,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    } | flags


@pytest.mark.parametrize(
    ("settings", "legacy"),
    [
        ({}, {}),
        ({"bos_token": "<x>", "pad_token": "<y>", "cls_token": "<x>"}, {}),
        ({"extra_special_tokens": ["<y>", "<x>"], "additional_special_tokens": ["[A]"]}, {}),
        ({"extra_special_tokens": {"x_token": "<x>", "y_token": "<y>"}}, {}),
        ({"extra_special_tokens": [], "additional_special_tokens": ["[A]", "<x>"]}, {}),
        ({"boi_token": {"__type": "AddedToken", **token("<x>", rstrip=True)}, "eoi_token": "<y>"}, {}),
        ({"split_special_tokens": True}, {}),
        ({"added_tokens_decoder": {"1": token("<s>", special=True), "9": token("<x>", lstrip=True)}}, {}),
        ({"additional_special_tokens": "DELETE"}, {"additional_special_tokens": ["<x>", "[A]"]}),
        (
            {},
            {
                "bos_token": token("<x>", rstrip=True),
                "eos_token": "<y>",
                "extra_special_tokens": ["[A]", "<x>"],
            },
        ),
        ({"added_tokens_decoder": {"1": token("<s>", special=True)}}, {"bos_token": "<x>"}),
    ],
)
def test_special_tokens_are_the_engines(
    settings: dict[str, Any],
    legacy: dict[str, Any],
    a_model: Path,
    oracle: Callable[..., Any],
) -> None:
    change(a_model / "tokenizer_config.json", **settings)
    if legacy:
        change(a_model / "special_tokens_map.json", **legacy)
    assert load(a_model).chat(HELLO).ids == oracle(a_model).chat(HELLO)


def test_the_tokenizer_may_lie_in_another_directory(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dirs["qwen"] / "config.json").read_text())
    counter = load(tmp_path, tokenizer_dir=model_dirs["qwen"])
    assert counter.chat(HELLO) == load(model_dirs["qwen"]).chat(HELLO)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read as JSON.*Copy the file"),
        ("tokenizer.json", "[]", r"tokenizer\.json holds no JSON object"),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": []}', r"tokenizer\.json cannot be loaded"),
        ("tokenizer_config.json", "nonsense", r"tokenizer_config\.json cannot be read"),
        ("config.json", "nonsense", r"config\.json cannot be read"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(
    file: str, content: str, message: str, a_model: Path
) -> None:
    (a_model / file).write_text(content)
    with pytest.raises(LoadError, match=message):
        load(a_model)


@pytest.mark.parametrize("name", ["bos_token", "extra_special_tokens", "added_tokens_decoder"])
def test_a_token_that_is_none_is_an_error_that_names_the_file(name: str, a_model: Path) -> None:
    change(a_model / "tokenizer_config.json", **{name: {"1": 5}})
    with pytest.raises(LoadError, match=r"tokenizer.*\.json.*Copy"):
        load(a_model)


def test_a_broken_template_entry_is_an_error_that_names_it(a_model: Path) -> None:
    (a_model / "chat_template.jinja").unlink()
    change(a_model / "tokenizer_config.json", chat_template=[{"name": "default"}])
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: chat_template"):
        load(a_model)


def test_a_missing_directory_and_a_wrong_format_are_errors(tmp_path: Path, a_model: Path) -> None:
    with pytest.raises(LoadError, match=r"nowhere is no directory.*config\.json"):
        load(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"nowhere is no directory.*tokenizer\.json"):
        load(a_model, tokenizer_dir=tmp_path / "nowhere")
    with pytest.raises(LoadError, match="auto, string or openai"):
        load(a_model, content_format="xml")


@pytest.mark.parametrize(
    ("settings", "config", "files", "why"),
    [
        ({}, {}, {"tekken.json": "{}"}, "mistral-common"),
        ({}, {}, {"tokenizer.json": None}, "there is no"),
        ({}, {"architectures": ["DeepseekV32ForCausalLM"]}, {}, "DeepseekV32ForCausalLM"),
        ({}, {"is_encoder_decoder": True}, {}, "encoder"),
        ({"tokenizer_class": "BertTokenizer"}, {}, {}, "BertTokenizer"),
        ({"tokenizer_class": "MistralCommonBackend"}, {}, {}, "mistral-common"),
        ({"tokenizer_class": "DELETE"}, {}, {}, "none stated"),
        ({"tokenizer_class": "LlamaTokenizer"}, {}, {}, "BPE"),
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, {}, {}, "auto_map"),
        ({"fix_mistral_regex": True}, {}, {}, "load time"),
        ({}, {}, {"added_tokens.json": '{"<new>": 5000}'}, "<new>"),
    ],
)
def test_a_model_that_the_engine_tokenizes_otherwise_says_so(
    settings: dict[str, Any], config: dict[str, Any], files: dict[str, str | None], why: str, a_model: Path
) -> None:
    change(a_model / "tokenizer_config.json", **settings)
    change(a_model / "config.json", **config)
    for name, content in files.items():
        (a_model / name).unlink() if content is None else (a_model / name).write_text(content)
    counter = load(a_model)
    assert why in counter.inexact_text
    with pytest.raises(NotExact, match="model"):
        counter.chat(HELLO)
    with pytest.raises(NotExact, match="model"):
        counter.completion({"prompt": "Hello"})
    # Ids are counted without a tokenizer.
    assert counter.completion({"prompt": [1, 2, 3]}).count == 3


@pytest.mark.parametrize(
    ("config", "files", "why"),
    [
        ({"model_type": "gpt_oss"}, {}, "Harmony"),
        ({}, {"chat_template.json": '{"chat_template": "x"}'}, "processor"),
    ],
)
def test_a_model_whose_chats_have_no_template_of_the_tokenizers_still_counts_text(
    config: dict[str, Any], files: dict[str, str], why: str, a_model: Path
) -> None:
    change(a_model / "config.json", **config)
    for name, content in files.items():
        (a_model / name).write_text(content)
    counter = load(a_model)
    assert why in counter.inexact_chat
    with pytest.raises(NotExact):
        counter.chat(HELLO)
    assert counter.completion({"prompt": "Hello"}).count > 0


def test_the_table_of_model_types_is_that_of_the_installed_transformers(oracle: Callable[..., Any]) -> None:
    oracle("smollm2")  # imports vLLM with its warnings kept quiet
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.auto import tokenization_auto as theirs
        from vllm.tokenizers.registry import _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS as AS_FILED_IN_VLLM

    registered = {
        model: (name or "").removesuffix("Fast") for model, name in theirs.TOKENIZER_MAPPING_NAMES.items()
    }
    registered |= dict.fromkeys(AS_FILED_IN_VLLM, "TokenizersBackend")
    known = model_types.AS_FILED | families.REBUILT.keys()
    assert {m: n for m, n in registered.items() if n in known} == {
        m: n for m in registered if (n := model_types.tokenizer_class(m))
    }
    assert {
        model
        for model in theirs.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if registered[model] not in model_types.AS_FILED
    } == model_types.STATED_CLASS_IS_WRONG


def test_the_fields_of_content_parts_are_the_engines(oracle: Callable[..., Any]) -> None:
    oracle("smollm2")  # imports vLLM with its warnings kept quiet
    from vllm.renderers.chat_utils import _KNOWN_CONTENT_PART_FIELDS

    assert messages.KNOWN_PART_FIELDS == _KNOWN_CONTENT_PART_FIELDS
