"""What a router and its counting process say to each other over a pipe.

A frame is one byte that says what it is, the length of the rest (4 bytes, little-endian), and the rest:

| to the process | rest |
|---|---|
| CONFIG | RouterConfig as JSON; the first frame |
| CHAT, COMPLETION | a request body as it came |

| from the process | rest |
|---|---|
| READY | JSON [why no text, why no chat can be counted, each empty where it can], or nothing |
| UNUSABLE | JSON message: the tokenizer cannot be loaded; the last frame |
| IDS | token ids, 4 bytes each in the machine's order |
| NOT_EXACT | JSON [reason, detail] |
| BAD_PROMPT, BAD_BODY | JSON [message, param or null] |
"""

from __future__ import annotations

import struct
from enum import IntEnum

HEADER = struct.Struct("<BI")

# One request's body, or its ids. A frame beyond it is none of ours.
MAX_LENGTH = 2**31


class Kind(IntEnum):
    CONFIG = 1
    CHAT = 2
    COMPLETION = 3
    READY = 16
    IDS = 17
    NOT_EXACT = 18
    BAD_PROMPT = 19
    BAD_BODY = 20
    UNUSABLE = 21


def header(kind: Kind, rest: bytes) -> bytes:
    return HEADER.pack(kind, len(rest))
