"""Tokens: the model's own where there is one, words elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.prompt import BadPrompt
from tandem.sim.args import parse
from tandem.sim.build import vocabulary
from tandem.sim.vocabulary import ModelVocabulary, WordVocabulary

from .helpers import FOX, engines, in_virtual_time

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a small tokenizer, a chat template and the sizes of a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([FOX * 3, "it was the day that the water of the river came"] * 3, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "dtype": "float32",
        "max_position_embeddings": 512,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_models_own_tokenizer_and_template_count(model: Path) -> None:
    words = vocabulary(parse(["--model", str(model)]), (5, 9))
    assert isinstance(words, ModelVocabulary)
    ids = words.chat({"messages": [{"role": "user", "content": FOX}]})
    assert words.decode(ids, skip_special=False) == f"<|im_start|>user\n{FOX}<|im_end|>\n"
    assert words.style.eos == 1
    text = words.completion({"prompt": FOX})
    assert words.decode(text, skip_special=True) == FOX
    assert "".join(words.text(i) for i in text) == FOX


def test_answer_tokens_are_whole_words_of_the_vocabulary(model: Path) -> None:
    words = vocabulary(parse(["--model", str(model)]), (5, 9))
    assert len(words.style.words) > 5
    assert all(words.text(i).strip() for i in words.style.words)


def test_what_cannot_be_rendered_here_is_a_bad_prompt(model: Path) -> None:
    words = vocabulary(parse(["--model", str(model)]), (5, 9))
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    with pytest.raises(BadPrompt, match="cannot render"):
        words.chat({"messages": [{"role": "user", "content": [image]}]})


def test_an_engine_takes_context_and_kv_size_from_the_model(model: Path) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(["--model", str(model), "--served-model-name", "m", "--block-size", "16"]) as e:
            assert (await e.ask(0, "/v1/models")).json["data"][0]["max_model_len"] == 512
            assert e[0].engine.profile.kv_bytes_per_token == 2 * 4 * 2 * 8 * 4
            told = (await e.complete(0, FOX, stop=["\0"], return_token_ids=True)).json
            tokens = (await e.ask(0, "/tokenize", {"prompt": FOX})).json
            assert told["usage"]["prompt_tokens"] == tokens["count"]
            ids = told["choices"][0]["token_ids"]
            assert (await e.ask(0, "/detokenize", {"tokens": ids})).json["prompt"] == told["choices"][0][
                "text"
            ]

    check()


def test_words_have_the_same_ids_everywhere() -> None:
    one, other = WordVocabulary((5, 9)), WordVocabulary((5, 9))
    ids = one.completion({"prompt": FOX})
    assert ids == other.completion({"prompt": FOX})
    assert len(ids) == 11
    assert one.decode(ids, skip_special=True) == FOX
    assert all(0 <= i < one.size for i in ids)


def test_words_of_a_chat_are_framed() -> None:
    words = WordVocabulary((5, 9))
    ids = words.chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]})
    assert words.decode(ids, skip_special=False) == "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"
    assert words.decode(ids, skip_special=True) == "user\nHiassistant\n"
