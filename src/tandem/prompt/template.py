"""A model's chat template: compiled once, rendered in a sandbox, as transformers 5 and vLLM 0.32 do it.

Environment and rendering follow `transformers.utils.chat_template_utils`; which arguments reach the template
follows vLLM's `safe_apply_chat_template`.
"""

import copy
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tandem.prompt.content_format import ContentFormat, detect
from tandem.prompt.errors import BadPrompt, NotExact, TooLong
from tandem.prompt.messages import Message, without_developer_role

# Arguments of transformers' apply_chat_template that reach a template whether it names them or not.
_ALWAYS_PASSED = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Room:
    """How many characters a rendering may still make of JSON, which a template may make and not print."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._encoded = 0

    def encode(self, characters: int) -> None:
        self._encoded += characters
        if self._encoded > self.most:
            raise TooLong(self.most)


_room: ContextVar[_Room | None] = ContextVar("room", default=None)


class ChatTemplate:
    """One compiled template; NotExact("chat template") if the source is no Jinja template."""

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(tree) | _ALWAYS_PASSED
        except (jinja2.TemplateError, RecursionError) as e:
            raise NotExact("chat template", f"not a Jinja template: {e}") from e
        self.content_format: ContentFormat = detect(tree)

    @cached_property
    def _knows_developer_role(self) -> bool:
        return '"developer"' in self.source or "'developer'" in self.source

    def render(
        self,
        messages: list[Message],
        special_tokens: Mapping[str, str],
        arguments: Mapping[str, object],
        *,
        most: int,
    ) -> str:
        """The prompt's text.

        arguments: `tools`, `documents`, `add_generation_prompt`, `continue_final_message` and whatever the
        request passes on; those that the template does not mention are dropped.
        most: characters of the text. An indented object grows with the square of its depth.
        Raises BadPrompt with the template's own message if it refuses the conversation; TooLong.
        """
        if not self._knows_developer_role and any(message["role"] == "developer" for message in messages):
            messages = without_developer_role(messages)
        values: dict[str, object] = {"tools": None, "documents": None, **special_tokens}
        values |= {name: value for name, value in arguments.items() if name in self._variables}
        continued = bool(values.pop("continue_final_message", False))
        before = _room.set(_Room(most))
        try:
            if not continued:
                return self._render(messages, values, most)
            if values.get("add_generation_prompt"):
                raise ValueError("continue_final_message and add_generation_prompt exclude each other.")
            return self._render_open_ended(messages, values, most)
        except TooLong:
            raise
        except Exception as e:
            # Templates raise whatever they like on conversations they do not support; the engine answers 400.
            raise BadPrompt(_reason(e), "messages") from e
        finally:
            _room.reset(before)

    def _render(self, messages: list[Message], values: Mapping[str, object], most: int) -> str:
        pieces = []
        room = most
        for piece in self._template.generate(messages=messages, **values):
            room -= len(piece)
            if room < 0:
                raise TooLong(most)
            pieces.append(piece)
        return "".join(pieces)

    def _render_open_ended(self, messages: list[Message], values: Mapping[str, object], most: int) -> str:
        """Renders with a tag at the end of the last message, then cuts there."""
        if "content" not in self.source:
            raise ValueError("continue_final_message is set, but the chat template does not use content.")
        messages = [*messages[:-1], copy.deepcopy(messages[-1])]
        final = _append_tag(messages[-1])
        rendered = self._render(messages, values, most)
        tag = _CONTINUE_TAG.strip()
        if final.strip() not in rendered or tag not in rendered:
            raise ValueError(
                "continue_final_message is set, but the final message does not appear in the prompt: "
                "the chat template drops or changes it."
            )
        end = rendered.rindex(tag)
        if rendered.startswith(_CONTINUE_TAG, end):
            return rendered[:end]
        # The template trimmed the message, tag included: the text before the tag is trimmed too.
        return rendered[:end].rstrip()


def _append_tag(message: Message) -> str:
    """Puts the tag behind the message's last text; returns that text without it."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + _CONTINUE_TAG
            return text
    raise ValueError("continue_final_message is set, but the final message has no text to continue.")


def _reason(error: BaseException) -> str:
    """The template's own words where it raised some, else those of the error itself."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, jinja2.TemplateError):
            return str(current)
        current = current.__cause__ or current.__context__
    return str(error)


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; prompts get what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes HTML characters; prompts must not.
    room = _room.get()
    if indent is None or room is None:
        encoded = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if room is not None:
            room.encode(len(encoded))
        return encoded
    # Piece by piece: of what is nested deeply a few bytes make megabytes of indentation.
    pieces = []
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    for piece in encoder.iterencode(value):
        room.encode(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
