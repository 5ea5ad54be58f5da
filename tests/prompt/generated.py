"""Odd requests put together from odd pieces, the same in every run; beside corpus, written by hand."""

import json
from random import Random
from types import ModuleType
from typing import Any

Body = dict[str, Any]

CHATS = 130
COMPLETIONS = 60

_RUNS = (" ", "  ", "\t", "\n", "\n\n\n", "\r\n", "\u00a0", "\u3000\u3000", "\u200d", "\u200b", " \n \n")
_CONTROLS = ("\x00", "\x01\x02", "\x1b[0m", "\x7f", "\x85", "\ufeff", "\ufffd", "\u2028", "\U0010fffe")
_JOINED = (
    "👩🏽‍🚀",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "👨‍👩‍👧",
    "✌🏿",
    "🇨🇭🇯🇵🇧",
    "e\u0301\u0323",
    "ก็ำ",
    "क्षि",
    "\u202eabc\u202c",
    "ﷺ",
    "ǆ",
    "Å",
)
_WORDS = (
    "don't",
    "THEY'LL",
    "naïve",
    "x86_64",
    "1,024.50",
    "Straße",
    "٣٤",
    "Ⅷ",
    "½",
    "ﬃ",
    "i̇",
    "'s",
    "``",
    "...",
    "—",
)


class Pieces:
    """Draws texts, messages and whole requests from one seed."""

    def __init__(self, seed: int, corpus: ModuleType) -> None:
        self._draw = Random(seed)
        self._corpus = corpus
        self._texts = [*corpus.PANGRAMS.values(), corpus.CODE, corpus.SPECIAL]
        self._special = corpus.SPECIAL.split()

    def text(self) -> str:
        draw = self._draw
        out = []
        for _ in range(draw.choice((0, 1, 2, 4, 9))):
            match draw.randrange(7):
                case 0:
                    out.append(draw.choice(_RUNS) * draw.randrange(1, 4))
                case 1:
                    out.append(draw.choice(_CONTROLS))
                case 2:
                    out.append(draw.choice(_JOINED))
                case 3:
                    out.append(draw.choice(self._special))
                case 4:
                    out.append(" ".join(draw.choices(_WORDS, k=draw.randrange(1, 6))))
                case 5:
                    code = draw.choice((0x100, 0x400, 0x5D0, 0x900, 0xE00, 0x3040, 0x4E00, 0xAC00, 0x1F300))
                    out.append("".join(chr(code + draw.randrange(0x80)) for _ in range(draw.randrange(1, 9))))
                case _:
                    text = draw.choice(self._texts)
                    at = draw.randrange(len(text))
                    out.append(text[at : at + draw.randrange(1, 120)])
        return "".join(out)

    def content(self) -> Any:
        kind = self._draw.randrange(8)
        if kind == 0:
            return [self._corpus.text(self.text()) for _ in range(self._draw.randrange(1, 4))]
        if kind == 1:
            return [self.text(), self._corpus.text(self.text(), cache_control={"type": "ephemeral"})]
        return self.text()

    def turn(self, number: int) -> list[Body]:
        """A user's message and what came of it."""
        draw, corpus = self._draw, self._corpus
        out = [corpus.user(self.content(), **self._maybe("name", "Ada"))]
        match draw.randrange(6):
            case 0:
                arguments = {self.text()[:9]: self.text(), "n": draw.random(), "deep": [None, {"ß": True}]}
                calls = [corpus.call("forecast", arguments, id=f"call_{number}")]
                out.append(corpus.assistant(None, tool_calls=calls))
                out.append(corpus.tool(self.content(), tool_call_id=f"call_{number}"))
                out.append(corpus.assistant(self.text()))
            case 1:
                out.append(corpus.assistant(self.text(), **self._maybe("reasoning", self.text())))
            case 2:
                out.append(corpus.assistant(f"<think>\n{self.text()}\n</think>\n\n{self.text()}"))
            case _:
                out.append(corpus.assistant(self.content()))
        return out

    def chat(self) -> Body:
        draw, corpus = self._draw, self._corpus
        messages = [corpus.system(self.content())] if draw.random() < 0.5 else []
        for number in range(draw.choice((0, 0, 1, 2, 5))):
            messages += self.turn(number)
        messages.append(corpus.user(self.content()))
        body: Body = {"messages": messages}
        if draw.random() < 0.15:
            body["messages"] = [*messages, corpus.assistant(self.text() or "Well,")]
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        for name, value, chance in (
            ("tools", [corpus.FORECAST, corpus.ODD_TOOL], 0.2),
            ("documents", [{"title": self.text(), "text": self.text()}], 0.15),
            ("chat_template_kwargs", {"enable_thinking": draw.random() < 0.5, "style": self.text()}, 0.2),
            ("add_generation_prompt", False, 0.1),
            ("add_special_tokens", draw.random() < 0.5, 0.2),
            ("reasoning_effort", "low", 0.1),
            ("model", "an-adapter", 0.2),
            ("truncate_prompt_tokens", draw.choice((1, 7, 40, -1)), 0.1),
        ):
            if draw.random() < chance:
                body[name] = value
        return body

    def completion(self) -> Body:
        draw = self._draw
        body: Body = {"prompt": self.text() or "x"}
        if draw.random() < 0.2:
            body["prompt"] = [draw.randrange(256) for _ in range(draw.randrange(1, 60))]
        for name, value, chance in (
            ("add_special_tokens", draw.random() < 0.5, 0.4),
            ("truncate_prompt_tokens", draw.choice((2, 5, 30, -1)), 0.25),
            ("truncation_side", draw.choice(("left", "right")), 0.2),
            ("max_tokens", draw.choice((1, 200)), 0.3),
            ("model", "an-adapter", 0.2),
        ):
            if draw.random() < chance:
                body[name] = value
        return body

    def _maybe(self, name: str, value: Any) -> Body:
        return {name: value} if self._draw.random() < 0.3 else {}


def chats(corpus: ModuleType) -> dict[str, Body]:
    pieces = Pieces(20, corpus)
    return {f"generated {i}": pieces.chat() for i in range(CHATS)}


def completions(corpus: ModuleType) -> dict[str, Body]:
    pieces = Pieces(21, corpus)
    return {f"generated {i}": pieces.completion() for i in range(COMPLETIONS)}


def with_objects(body: Body) -> Body:
    """The request with its calls' arguments as objects, which some servers take and vLLM 0.32 does not."""
    changed: Body = json.loads(json.dumps(body))
    for message in changed["messages"]:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return changed
