"""Tokenizer classes of transformers 5 that do not take tokenizer.json as it is.

For most models transformers loads tokenizer.json unchanged. Some classes keep only its vocabulary, merges
and post-processor and set normalizer, pre-tokenizer and BPE options themselves: the file alone gives other
ids. This module says which class a model gets and rebuilds what that class would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tandem.prompt import model_types
from tandem.prompt.errors import NotExact

Component: TypeAlias = dict[str, object] | None  # a normalizer or pre-tokenizer as tokenizer.json spells it
Options: TypeAlias = Mapping[str, object]  # tokenizer_config.json


@dataclass(frozen=True, slots=True)
class Family:
    """How a tokenizer class differs from the file. The default: it does not.

    special_tokens: defaults for names that tokenizer_config.json leaves out.
    bpe: options of the BPE model; None = the file is taken as it is, and nothing below counts.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    bpe: Mapping[str, object] | None = None
    uses_unk_token: bool = False
    normalizer: Component = None
    pre_tokenizer: Callable[[Options], Component] = lambda options: None
    keeps_post_processor: bool = True
    adds_special_tokens_again: bool = False

    def rebuild(
        self, document: dict[str, object], options: Options, unk_token: str | None
    ) -> dict[str, object]:
        """tokenizer.json as this family's class would have written it."""
        if self.bpe is None:
            return document
        model = document.get("model")
        if not isinstance(model, dict) or model.get("type") != "BPE":
            raise NotExact("tokenizer", "tokenizer.json holds no BPE model, its tokenizer class expects one")
        return {
            "version": "1.0",
            "added_tokens": [],  # the class adds them from its own settings
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer(options),
            "post_processor": document.get("post_processor") if self.keeps_post_processor else None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": unk_token if self.uses_unk_token else None,
                "byte_fallback": False,
                "fuse_unk": False,
                "ignore_merges": False,
                **self.bpe,
                "vocab": model["vocab"],
                "merges": model["merges"],
            },
        }


def of(tokenizer_config: Mapping[str, object], model_config: Mapping[str, object]) -> Family:
    """The family of a model, by the rules of AutoTokenizer.

    tokenizer_config, model_config: tokenizer_config.json and the config.json beside it.
    Raises NotExact for classes whose ids are not known to be equal.
    """
    stated = tokenizer_config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if stated == "MistralCommonBackend":
        raise NotExact("tokenizer", "mistral-common tokenizes for this model")
    if "auto_map" in tokenizer_config:
        raise NotExact("tokenizer", "tokenizer_config.json names code of its own (auto_map)")
    if tokenizer_config.get("fix_mistral_regex") is not None or "fast_tokenizer_files" in tokenizer_config:
        raise NotExact("tokenizer", "tokenizer_config.json asks for changes at load time")
    model_type = model_config.get("model_type")
    registered = model_types.tokenizer_class(model_type if isinstance(model_type, str) else "")
    if registered in model_types.AS_FILED or (registered and model_type in model_types.STATED_CLASS_IS_WRONG):
        name = registered
    else:
        name = stated if isinstance(stated, str) else registered
    name = name.removesuffix("Fast")
    if name in model_types.AS_FILED:
        return Family()
    if name not in REBUILT:
        raise NotExact(
            "tokenizer", f"transformers rebuilds the tokenizer by its class {name or '(none stated)'}"
        )
    return REBUILT[name]


def _byte_level(options: Options, use_regex: bool = True) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": bool(options.get("add_prefix_space")),
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _qwen_words(letters: str) -> Callable[[Options], Component]:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda options: _sequence(split, _byte_level(options, use_regex=False))


def _sequence(*parts: dict[str, object]) -> Component:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _llama_words(options: Options) -> Component:
    scheme = "always" if options.get("legacy", False) else "first"
    if options.get("add_prefix_space") is False:
        scheme = "never"
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


_BYTE_LEVEL_BPE = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_NFC: Component = {"type": "NFC"}
_QWEN_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_GPT2_TOKENS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")

REBUILT: Mapping[str, Family] = {
    "GPT2Tokenizer": Family(_GPT2_TOKENS, _BYTE_LEVEL_BPE, pre_tokenizer=_byte_level),
    "GPTNeoXTokenizer": Family(
        _GPT2_TOKENS | {"pad_token": "<|padding|>"},
        _BYTE_LEVEL_BPE,
        normalizer=_NFC,
        pre_tokenizer=_byte_level,
        keeps_post_processor=False,
    ),
    "Qwen2Tokenizer": Family(
        _QWEN_TOKENS,
        _BYTE_LEVEL_BPE,
        normalizer=_NFC,
        pre_tokenizer=_qwen_words(r"\p{L}"),
        adds_special_tokens_again=True,
    ),
    "Qwen3_5Tokenizer": Family(
        _QWEN_TOKENS, _BYTE_LEVEL_BPE, normalizer=_NFC, pre_tokenizer=_qwen_words(r"\p{L}\p{M}")
    ),
    "LlamaTokenizer": Family(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        {"fuse_unk": True, "byte_fallback": True},
        pre_tokenizer=_llama_words,
    ),
    "GemmaTokenizer": Family(
        {
            n: f"<{n.removesuffix('_token')}>"
            for n in ("unk_token", "bos_token", "eos_token", "pad_token", "mask_token")
        },
        {"fuse_unk": True, "byte_fallback": True},
        uses_unk_token=True,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer=lambda options: {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    ),
}
