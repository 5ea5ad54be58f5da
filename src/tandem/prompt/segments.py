"""Text that was tokenized before is not tokenized again: a bounded cache of what lies between markers.

A chat grows at its end, so most of a request's text was in the request before it. A text may be cut where no
token can span the cut and where what comes after does not see what came before.

`tokenizers` works in this order: (1) it finds the added tokens that are not normalized, leftmost first, of
those that begin at one place the longest; (2) it normalizes, splits and tokenizes each stretch between them
by itself; all that a stretch knows of the rest is whether it begins the text. So the end of such a token is a
safe cut wherever the token stands, if no other added token can take part of it away. A *marker* is a token
- whose spelling overlaps no other added token's and not itself: no end of one is the beginning of the other,
  and no other token contains it, unless at its own end (then both end at the same place);
- that takes no spaces after it along (rstrip), nor does a token that ends with it; and that does not begin
  with a space that another token could take.
A tokenizer with tokens that match whole words only (single_word), or that reads special tokens as text, has
no markers: there a token's match depends on its neighbours. Each piece is tokenized behind the marker that
ends the piece before it, so that it does not look like a beginning; the marker's own id is then dropped.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from tokenizers import AddedToken

from tandem.prompt.tokenizer import Encoder

# For shorter pieces the calls would cost more than the tokenizing.
_SHORTEST = 256

# Bytes of an entry beside its text and its ids: keys, links, headers.
_ENTRY = 200


def markers(added: Iterable[AddedToken], *, splits_special_tokens: bool = False) -> list[str]:
    """Spellings of the added tokens behind which any text may be cut."""
    added = list(added)
    if splits_special_tokens or any(token.single_word for token in added):
        return []
    found = {token.content: token for token in added if not token.normalized and token.content}
    unsafe = _overlapping(found)
    takes_spaces = tuple(text for text, token in found.items() if token.rstrip)
    return [
        text
        for text in found
        if text not in unsafe and not text[0].isspace() and not any(t.endswith(text) for t in takes_spaces)
    ]


def _overlapping(tokens: Iterable[str]) -> set[str]:
    """Tokens that begin as another one (or they themselves) ends, or lie in another one before its end."""
    tokens = list(tokens)
    beginning_with: dict[str, set[str]] = {}
    for token in tokens:
        for n in range(1, len(token)):
            beginning_with.setdefault(token[:n], set()).add(token)
    found: set[str] = set()
    known = set(tokens)
    for token in tokens:
        for at in range(1, len(token)):
            found |= beginning_with.get(token[at:], set())
        inside = token[:-1]
        found |= known & {inside[i:j] for i in range(len(inside)) for j in range(i + 1, len(inside) + 1)}
    return found


class SegmentCache:
    """An encoder in front of another that remembers pieces of text, the least recently used leaving first.

    cuts: markers of its tokenizer. most_bytes: of texts and ids held. shortest: characters of a piece, at
    least, but for the last one. Threads may share it."""

    def __init__(
        self, inner: Encoder, cuts: Iterable[str], most_bytes: int, *, shortest: int = _SHORTEST
    ) -> None:
        self._inner = inner
        self._shortest = shortest
        self._most_bytes = most_bytes
        self._bytes = 0
        # Longest first: of two markers at one place the tokenizer takes that one.
        alternatives = "|".join(map(re.escape, sorted(cuts, key=len, reverse=True)))
        self._cut = re.compile(alternatives) if alternatives and most_bytes else None
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._bytes

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Special tokens around the whole are the business of the library's last step.
        if self._cut is None or add_special_tokens or len(text) < self._shortest:
            return self._inner.encode(text, add_special_tokens)
        ids: list[int] = []
        start = end = 0  # of the piece, with the marker before it; of the piece before it
        for marker in self._cut.finditer(text):
            if marker.end() - end >= self._shortest:
                piece = self._piece(text[start : marker.end()])
                ids.extend(piece[1:] if end else piece)
                start, end = marker.span()
        if not end:
            return self._inner.encode(text, False)
        if end < len(text):
            # What may still grow is not worth remembering.
            ids.extend(self._inner.encode(text[start:], False)[1:])
        return ids

    def _piece(self, text: str) -> "array[int]":
        with self._lock:
            if (known := self._ids.get(text)) is not None:
                self._ids.move_to_end(text)
                return known
        ids = array("I", self._inner.encode(text, False))
        cost = _cost(text, ids)
        # One entry must not push out all others.
        if cost <= self._most_bytes // 4:
            with self._lock:
                if text not in self._ids:
                    self._ids[text] = ids
                    self._bytes += cost
                while self._bytes > self._most_bytes:
                    self._bytes -= _cost(*self._ids.popitem(last=False))
        return ids


def _cost(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + len(ids) * ids.itemsize + _ENTRY
