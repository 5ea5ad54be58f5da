"""`truncate_prompt_tokens` and `truncation_side`, as vLLM's TokenizeParams applies them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.prompt.errors import NotExact
from tandem.prompt.fields import choice, integer

_SIDES = frozenset({"left", "right"})


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a request shortens its prompt.

    length: tokens to keep, at least 1. side: where to cut; None = as the tokenizer does: at the left.
    max_model_len: tokens of context, None if not known.
    """

    length: int
    side: Literal["left", "right"] | None
    max_model_len: int | None

    @classmethod
    def of(
        cls, body: Mapping[str, object], max_output_tokens: int, max_model_len: int | None
    ) -> "Truncation | None":
        side = choice(body, "truncation_side", _SIDES)
        length = integer(body, "truncate_prompt_tokens")
        if length is None:
            return None
        if length == -1 and max_model_len is not None:
            # The whole context, less one token of output if any is asked for.
            length = max_model_len - 1 if max_output_tokens else max_model_len
        if length < 1 or (max_model_len is not None and length > max_model_len):
            raise NotExact("truncation", f"truncate_prompt_tokens is {length}")
        return cls(length, None if side is None else "left" if side == "left" else "right", max_model_len)

    def cut(self, ids: list[int]) -> list[int]:
        return ids[: self.length] if self.side == "right" else ids[-self.length :]

    def cut_text(self, text: str, longest_token: int) -> str:
        """Text far beyond the context is cut before it is tokenized, which can change the ids at the cut."""
        if self.max_model_len is None:
            raise NotExact("truncation", "truncation_side, and the context's length is not known")
        characters = self.max_model_len * longest_token
        if len(text) <= characters:
            return text
        return text[:characters] if self.side == "right" else text[-characters:]
