"""Models small enough to be made in a test, and fake engines that serve their files beside the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from tandem.config import RouterConfig
from tandem.http import Request, Responder
from tandem.prompt import LoadError, PromptCounter, load
from tandem.router.counting_places import InLoop
from tandem.router.helper_process import Unusable

from .fakes import FakeEngine

PATH = "/tandem/model/"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
)
LONGER = TEMPLATE + " please"  # a token more in every chat


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    """A folder as a Hub model has it: characters are tokens, but for a few words."""
    folder.mkdir(exist_ok=True)
    pieces = ["[UNK]", *map(chr, range(33, 127)), *(f"##{chr(c)}" for c in range(33, 127)), "user", "please"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": []}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass
class ModelPod:
    """Has a fake engine count with a model, and serve its files as nginx does."""

    engine: FakeEngine
    folder: Path
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(method, name) of each request for a file, in their order."""
    sent: list[str] = field(default_factory=list)
    """Names of the files whose bytes went out."""
    answer: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
    """What every request for a file is answered instead."""
    tag: bytes = b'"%d-%x"'
    """What an ETag is like; it takes a file's size and a number that goes by its content."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set, requests for files get no answer."""
    off: int = 0
    """By how much it counts otherwise than its files say."""

    def __post_init__(self) -> None:
        self.open.set()
        self.restart()
        self.engine.knows_ids = False
        self.engine.tokens = lambda body: _count(self._counter, body) + self.off
        self.engine.elsewhere = self._serve

    def restart(self) -> None:
        """Load the model anew."""
        self._counter = load(self.folder)

    async def _serve(self, request: Request, responder: Responder) -> None:
        if not request.path.startswith(PATH):
            responder.send(404, [])
            return
        name = request.path.removeprefix(PATH)
        self.asked.append((request.method, name))
        await self.open.wait()
        if self.answer is not None:
            responder.send(*self.answer)
            return
        path = self.folder / name
        if not path.is_file():
            responder.send(404, [])
            return
        data = path.read_bytes()
        tag = self.tag % (len(data), hash(data) & 0xFFFF)
        if request.header(b"if-none-match") == tag:
            responder.send(304, [(b"etag", tag)])
        else:
            if request.method == "GET":
                self.sent.append(name)
            responder.send(200, [(b"etag", tag)], data)


def _count(counter: PromptCounter, body: Mapping[str, Any]) -> int:
    return (counter.completion(body) if "prompt" in body else counter.chat(body)).count


async def in_loop(config: RouterConfig, model: Path) -> InLoop:
    """Loads a model in the test's own process: no child has to start."""
    try:
        return InLoop(load(model), None, 0)
    except LoadError as error:
        raise Unusable(str(error)) from None
