"""What is asked: chats of one message, no two of which begin alike."""

from __future__ import annotations

import itertools
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from fake_engines import MODEL

_SYLLABLES = "an be ca do el fi go hu in ka lo mi no or pa qui re so ti um va we xi yo za str ough tion ment"
_WORDS = 40_000


def chat(text: str, tokens: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    asked = {**body, "stream": True, "max_tokens": tokens}
    return json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()


def prose(low: int, high: int, seed: int) -> Iterator[str]:
    """Made-up words without end, in messages of `low` to `high` bytes."""
    chance = random.Random(seed)
    syllables = _SYLLABLES.split()
    words = ("".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(_WORDS))
    text = " ".join(words)
    for number in itertools.count():
        size = chance.randint(low, high)
        begin = chance.randrange(len(text) - size)
        yield f"{number} {text[begin : begin + size]}"[:size]


def installed() -> list[Path]:
    """Python code: the standard library, and what is installed beside it."""
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib")}
    return sorted({path for folder in folders for path in Path(folder).rglob("*.py")})


def code(files: Sequence[Path], low: int, high: int, seed: int) -> Iterator[str]:
    """Pieces of files, in messages of `low` to `high` characters; each is there once."""
    chance = random.Random(seed)
    text = ""
    for path in chance.sample(files, len(files)):
        text += path.read_text("utf-8", "ignore")
        while len(text) >= high:
            size = chance.randint(low, high)
            yield text[:size]
            text = text[size:]
