"""Requests of a trace as real prompts: what they share in the trace, they share as text and as tokens.

A prompt is made of pieces: the first n words of an endless stream of words that a number names. The prompts
of the Mooncake trace have a piece of 512 tokens for each hash id, the last one cut; an id there stands for a
block together with all before it, so prompts share exactly the prefixes that they share there. A word, with
the space before it, is one token of the model folder that `write_model` makes for engines and routers.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MOONCAKE = Path(__file__).resolve().parent / "data" / "mooncake_conversation_2000.jsonl"
BLOCK = 512
"""Tokens of a block of the trace."""
TICK = 3.0
"""Seconds to which the trace's times are rounded."""
MAX_MODEL_LEN = 131_072
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_WORDS = ["".join(letters) for letters in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS)]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`at`: seconds since the trace began. `pieces`: (stream, tokens of it), which the prompt joins."""

    number: int
    at: float
    pieces: tuple[tuple[int, int], ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)

    @property
    def session(self) -> str:
        """The conversation that it probably belongs to, as the trace names none: that of all prompts with the
        same second piece. (The first is the system prompt, which nearly all of them share.)"""
        return str(self.pieces[min(1, len(self.pieces) - 1)][0])

    @property
    def text(self) -> str:
        """The prompt. Worked out each time: 0.1 ms for 1,000 tokens."""
        return " ".join(word for stream, tokens in self.pieces for word in words(stream, tokens))


def words(stream: int, count: int) -> list[str]:
    """The first words of a stream; each is one token."""
    return random.Random(stream).choices(_WORDS, k=count)


def load(
    path: Path = MOONCAKE, *, requests: int | None = None, block: int = BLOCK, most_output: int | None = None
) -> list[TraceRequest]:
    """A trace of Mooncake's form.

    requests: only the first so many. most_output: a cap on answers, in tokens.
    block: tokens that stand for the 512 of a block; fewer make all prompts shorter in proportion, for engines
    whose costs of a token and memory are scaled likewise.
    """
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(itertools.islice(lines, requests)):
            entry = json.loads(line)
            ids, length = entry["hash_ids"], max(1, round(entry["input_length"] * block / BLOCK))
            sizes = [block] * (len(ids) - 1) + [max(1, length - block * (len(ids) - 1))]
            output = max(1, min(entry["output_length"], most_output or entry["output_length"]))
            pieces = tuple(zip(ids, sizes, strict=True))
            found.append(TraceRequest(number, entry["timestamp"] / 1000, pieces, output))
    return found


def spread(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The trace with its times anywhere within the seconds to which they were rounded, in the same order."""
    rng = random.Random(seed)
    moved: list[TraceRequest] = []
    for _, tick in itertools.groupby(requests, key=lambda r: r.at):
        together = list(tick)
        offsets = sorted(rng.uniform(0, TICK) for _ in together)
        moved += (replace(r, at=r.at + offset) for r, offset in zip(together, offsets, strict=True))
    return moved


def hot_prefix(
    requests: int,
    per_second: float,
    *,
    seed: int,
    shared: int = 8000,
    share: float = 0.8,
    own: tuple[int, int] = (100, 1000),
    others: tuple[int, int] = (1000, 4000),
    output: tuple[int, int] = (50, 150),
) -> list[TraceRequest]:
    """Requests at random times of which the part `share` begins with the same `shared` tokens, followed by
    some of its own; the others have all of their tokens alone. Ranges: tokens, both ends included."""
    rng = random.Random(seed)
    found, at = [], 0.0
    for number in range(requests):
        at += rng.expovariate(per_second)
        alone = -1 - (seed * requests + number)  # no stream of the trace has such a number
        if rng.random() < share:
            pieces: tuple[tuple[int, int], ...] = ((0, shared), (alone, rng.randint(*own)))
        else:
            pieces = ((alone, rng.randint(*others)),)
        found.append(TraceRequest(number, at, pieces, rng.randint(*output)))
    return found


def bound(requests: Sequence[TraceRequest], blocks: int, block: int = BLOCK) -> float:
    """The hit rate, 0 to 1, of one cache of so many blocks that all engines would share: tokens found, of all
    tokens of prompts.

    It keeps what was used last, knows a block as soon as it was asked for, and holds no answers. As in vLLM a
    hit leaves at least one token to compute and is whole blocks. Only for prompts whose pieces are blocks.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    found = asked = 0
    for request in requests:
        full = [stream for stream, tokens in request.pieces if tokens == block]
        asked += request.prompt_tokens
        for stream in full[: (request.prompt_tokens - 1) // block]:
            if stream not in kept:
                break
            found += block
        for stream in reversed(full):  # the beginning of a prompt outlives its end
            kept[stream] = None
            kept.move_to_end(stream)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return found / asked


def write_model(folder: Path) -> Path:
    """A model folder without weights: a byte-level tokenizer that takes any text, to which each word of a
    prompt is one token, with or without a space before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<|end|>", *alphabet])}
    merges = [*itertools.product(_CONSONANTS, _VOWELS), *((w[:2], w[2]) for w in _WORDS)]
    merges += [("Ġ", word) for word in _WORDS]  # Ġ: a space, as byte-level tokenizers write it
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": 0,
    }
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder
