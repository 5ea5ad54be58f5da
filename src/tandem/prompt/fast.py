"""fastokens: the ids of `tokenizers` in a fraction of the time, used where it proves to give the same ids.

It refuses tokenizers that it does not know (WordPiece, Unigram, Metaspace). Whatever it takes is compared
with the reference on texts chosen to differ where libraries do: every script, runs of spaces, digits, control
characters, and the tokenizer's own added tokens in all kinds of company.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from tandem.prompt.errors import is_panic
from tandem.prompt.tokenizer import Encoder, ReferenceEncoder, valid

logger = logging.getLogger("tandem.prompt")

# Of a tokenizer with thousands of added tokens so many are tried.
_TOKENS_TRIED = 64

_SENTENCES = (
    "Sphinx of black quartz, judge my vow; don't we'll THEY'VE I'd. ÉCOLE ﬁﬂ ①½² ǅ ẞ İı",
    "def f(xs: list[int]) -> int:\n\treturn sum(x  for x in xs   if x % 2 == 0)    # even\n\n\n    pass\r\n",
    "0 12 345 6789 1234567 3.14159 1e-9 0x7F 1,000,000 ٣٤ ४५ Ⅳ ⅔",
    "  two  spaces\t\ttabs\n\n feeds \r\n\u00a0hard\u2003em\u200bzero\u3000wide\u2028line\u0085next ",
    "a\x00b\x07c\x1b[31md\x7f\ufeff\ufffd\U0010fffe",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇨🇭 e\u0301\u0302\u0303 각 ก็ำ नि عَرَبِيّ שָׁלוֹם",
)


def fastest(
    reference: ReferenceEncoder, open_fast: Callable[[str], Any] | None = None
) -> tuple[Encoder, str]:
    """The encoder to use, and its library's name: fastokens where it is installed, takes this tokenizer and
    gives the reference's ids, else the reference. A difference is logged as an error.

    open_fast: makes the fast library's tokenizer of a tokenizer.json; default: fastokens, if installed."""
    open_fast = open_fast or _installed()
    if open_fast is None:
        return reference, "tokenizers"
    try:
        fast = FastEncoder(open_fast(reference.to_json()), reference)
    except BaseException as e:
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        logger.info("fastokens does not take this tokenizer, so tokenizers counts, which is slower: %s", e)
        return reference, "tokenizers"
    if (text := fast.first_difference()) is not None:
        logger.error(
            "fastokens gives other ids than tokenizers for %r (and perhaps for more), so tokenizers counts, "
            "which is slower. Please report it to fastokens, with the model's name.",
            text,
        )
        return reference, "tokenizers"
    return fast, "fastokens"


class FastEncoder:
    """A fast library behind the same interface. A text that it refuses goes to the reference; after a panic
    all do."""

    def __init__(self, tokenizer: Any, reference: ReferenceEncoder) -> None:
        self._tokenizer = tokenizer
        self._reference = reference
        self._split = reference.splits_special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        fast = self._fast(valid(text), add_special_tokens)
        return self._reference.encode(text, add_special_tokens) if fast is None else fast

    def first_difference(self) -> str | None:
        """A text with other ids than the reference's, or None where all that were tried are equal."""
        for text in _samples(self._reference):
            for special in (False, True):
                ids = self._fast(text, special)
                if ids is not None and ids != self._reference.encode(text, special):
                    return text
        return None

    def _fast(self, text: str, add_special_tokens: bool) -> list[int] | None:
        if self._tokenizer is None:
            return None
        try:
            return list(self._tokenizer.encode(text, add_special_tokens, self._split).ids)
        except (
            Exception
        ):  # as documented: a byte that the vocabulary lacks, a limit of the regular expressions
            return None
        except BaseException as e:
            if not is_panic(e):
                raise
            logger.error("fastokens failed (%s), so tokenizers counts from now on", type(e).__name__)
            self._tokenizer = None
            return None


def _installed() -> Callable[[str], Any] | None:
    try:
        import fastokens
    except ImportError:
        return None
    return fastokens.Tokenizer.from_json_str  # type: ignore[no-any-return]


def _samples(reference: ReferenceEncoder) -> Iterator[str]:
    yield from _SENTENCES
    yield from (f"{chr(c)}a {chr(c)}{chr(c)}\n" for c in range(0x100))
    # Every script of the basic plane, then emoji, historic scripts and rare ideographs.
    for start in [
        *range(0x20, 0xD600, 0x200),
        *range(0xF900, 0xFF00, 0x200),
        *range(0x10000, 0x30000, 0x800),
    ]:
        yield "".join(map(chr, range(start, start + 0x1E0, 0x11)))
        yield " ".join(chr(start + 0x40 + i) * (i + 1) for i in range(4))
    for token in [t.content for t in reference.added_tokens][:_TOKENS_TRIED]:
        yield f"{token}a{token} {token}\n{token}\t b  {token}{token}1{token[:-1]}{token[1:]}"
