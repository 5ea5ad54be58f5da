"""Text to token ids, with the `tokenizers` library."""

from typing import Literal, Protocol

from tokenizers import AddedToken, Encoding, Tokenizer

from tandem.prompt.errors import BadPrompt, NotExact, is_panic


class Encoder(Protocol):
    """Text to token ids. The seam for a faster library than the reference one."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class ReferenceEncoder:
    """The `tokenizers` library: what vLLM uses, so what every other encoder is measured by."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Files may carry truncation and padding from training; vLLM sets both itself, per request.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        #: Characters of the longest vocabulary entry.
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)

    @property
    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found in the text before the model sees it."""
        return list(self._tokenizer.get_added_tokens_decoder().values())

    @property
    def splits_special_tokens(self) -> bool:
        """Whether a special token's spelling is tokenized like any text."""
        return bool(self._tokenizer.encode_special_tokens)

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_truncated(
        self, text: str, add_special_tokens: bool, length: int, side: Literal["left", "right"]
    ) -> list[int]:
        """At most `length` ids: text is cut at `side`, special tokens count and stay."""
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        if length <= special or length >= 2**32:
            raise NotExact("truncation", f"truncate_prompt_tokens is {length}")
        encoding = self._encoding(text, False)
        encoding.truncate(length - special, direction=side)
        ids: list[int] = self._tokenizer.post_process(encoding, None, add_special_tokens).ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            return self._tokenizer.encode(valid(text), add_special_tokens=add_special_tokens)
        except BaseException as e:
            if not is_panic(e):
                raise
            # Seen where a token that takes the spaces after it stands before one that begins with a space.
            raise NotExact("tokenizer", "the tokenizers library panicked") from e


def valid(text: str) -> str:
    """The text itself; raises BadPrompt where it is not Unicode."""
    # JSON can carry half a surrogate pair ("\ud800"); no tokenizer takes it.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadPrompt("The prompt is not valid Unicode: it holds a lone surrogate.") from e
    return text
