"""The lines of `tandem chat`: messages and commands in, answers and their figures out."""

from __future__ import annotations

import json
import os.path
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem.cli import let_go
from tandem.cli.console import err, ms, out

if TYPE_CHECKING:
    from tandem.bench.conversation import Answer, Conversation

MESSAGE_BYTES = 8 << 20
"""Longest message, with the files that go with it: more than fits into any model's context."""

_TOO_LONG = f"a message may have {MESSAGE_BYTES >> 20} MiB, files included"

_HELP = """\
/file PATH     put a file into the next message, as to try a long prompt
/system TEXT   say what the model is to be, from the next message on; without TEXT: nothing
/reset         forget what was said; the system message stays
/help          this
/quit          end, as Ctrl-D does; Ctrl-C ends the answer that is being written
A message that begins with a slash is sent with a space before it."""

# What a model writes must not steer the terminal: all control characters but line end and tab.
_CONTROLS = dict.fromkeys([*(c for c in range(32) if c not in (9, 10)), *range(127, 160)], "�")


class Screen(Protocol):
    """Where answers are shown."""

    def text(self, piece: str) -> None:
        """A part of an answer, as it comes."""

    def thought(self, piece: str) -> None:
        """A part of what a reasoning model thinks before it."""

    def ended(self, answer: Answer, *, stopped: bool) -> None:
        """An answer that has ended, or was `stopped` by the person."""

    def failed(self, why: str, answer: Answer | None) -> None:
        """A line that came to nothing; `answer` is what there was of its answer."""

    def note(self, what: str) -> None:
        """What a command has done."""


class Terminal:
    """For a person: an answer as it comes, and below it one dim line of figures."""

    def __init__(self) -> None:
        self._column = 0

    def text(self, piece: str) -> None:
        sys.stdout.write(piece.translate(_CONTROLS))
        sys.stdout.flush()
        self._column = len(piece.rpartition("\n")[2]) + (0 if "\n" in piece else self._column)

    def thought(self, piece: str) -> None:
        out.print(piece.translate(_CONTROLS), end="", style="dim", markup=False)
        self._column = 1

    def ended(self, answer: Answer, *, stopped: bool) -> None:
        self._new_line()
        out.print(f"{figures(answer, stopped=stopped)}\n", style="dim", markup=False)

    def failed(self, why: str, answer: Answer | None) -> None:
        self._new_line()
        back = "" if answer is None else " The turn was taken back."
        out.print(f"{why.translate(_CONTROLS)}{back}\n", style="red", markup=False)

    def note(self, what: str) -> None:
        out.print(what, style="dim", markup=False)

    def _new_line(self) -> None:
        if self._column:
            self.text("\n")


class Plain:
    """For a pipe: answers on stdout, one after the other, and all else on stderr."""

    def text(self, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    def thought(self, piece: str) -> None:
        pass

    def ended(self, answer: Answer, *, stopped: bool) -> None:
        self.text("\n")
        err.print(figures(answer, stopped=stopped), markup=False)

    def failed(self, why: str, answer: Answer | None) -> None:
        if answer is not None and answer.text:
            self.text("\n")
        err.print(f"tandem: {why}", markup=False)

    def note(self, what: str) -> None:
        err.print(what, markup=False)


class Json(Plain):
    """For a program: an object for each message, on a line of its own; `error` is null in an answer."""

    def text(self, piece: str) -> None:
        pass

    def ended(self, answer: Answer, *, stopped: bool) -> None:
        print(json.dumps({**answer.as_dict(), "error": None}), flush=True)

    def failed(self, why: str, answer: Answer | None) -> None:
        super().failed(why, None)
        if answer is not None:
            print(json.dumps({**answer.as_dict(), "error": why}), flush=True)


def figures(answer: Answer, *, stopped: bool = False) -> str:
    """An answer's path, prompt tokens, TTFT, ITL and pace, in one line; what is not known is left out."""
    told = answer.as_dict()
    if stopped and told["ttft_ms"] is None:
        return "stopped before its first token"
    parts = [(told["path"] or "path unknown").replace("_", " ")]
    if told["reason"]:
        parts[0] += f" ({told['reason'].replace('_', ' ')})"
    if told["prompt_tokens"] is not None:
        parts.append(f"{told['prompt_tokens']:,} prompt tokens")
    if told["ttft_ms"] is not None:
        parts.append(f"TTFT {ms(told['ttft_ms'])}")
    if told["itl_p50_ms"] is not None:
        parts.append(f"ITL p50 {ms(told['itl_p50_ms'])}, longest {ms(told['itl_max_ms'])}")
    if told["tokens_per_s"] is not None:
        parts.append(f"{told['tokens_per_s']:.1f} tokens/s")
    if stopped:
        parts.append("stopped")
    elif told["finish_reason"] == "length":
        parts.append("cut off at its longest")
    return " · ".join(parts)


class Dialogue:
    """Takes lines, asks, and shows. `run` runs a coroutine to its end, KeyboardInterrupt cancels it; `why`
    puts what went wrong with a request into words, None where it is none of these."""

    def __init__(
        self,
        conversation: Conversation,
        screen: Screen,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        why: Callable[[Exception], str | None],
        *,
        survives_interrupts: bool,
    ) -> None:
        """`survives_interrupts`: else KeyboardInterrupt ends it."""
        self.failures = 0
        """Lines that came to nothing."""
        self._conversation = conversation
        self._screen = screen
        self._run = run
        self._why = why
        self._survives_interrupts = survives_interrupts
        self._files: list[str] = []

    def hold(self, read: Callable[[], str | None]) -> None:
        """Take lines until `read` gives None, or a line says to end. `read` raises ValueError for a line that
        cannot be taken."""
        while True:
            try:
                line = read()
                if line is None or line.rstrip() == "/quit":
                    return
                self._take(line)
            except ValueError as error:
                self._failed(str(error), None)
            except KeyboardInterrupt:
                if not self._survives_interrupts:
                    raise
                self._screen.note("\n/quit or Ctrl-D ends the chat")

    def _take(self, line: str) -> None:
        """Raises ValueError, in words for the person who wrote the line."""
        if line.startswith("/"):
            self._command(line)
        elif line.strip():
            question = "\n\n".join([*self._files, line.strip()])
            self._files.clear()
            if len(question.encode()) > MESSAGE_BYTES:
                raise ValueError(_TOO_LONG)
            self._ask(question)

    def _ask(self, question: str) -> None:
        conversation, screen = self._conversation, self._screen
        try:
            self._run(conversation.ask(question, on_text=screen.text, on_thought=screen.thought))
        except KeyboardInterrupt:
            let_go(sys.stdout)
            screen.ended(conversation.last, stopped=True)
            if not self._survives_interrupts:
                raise
        except Exception as error:
            if (why := self._why(error)) is None:
                raise
            self._failed(why, conversation.last)
        else:
            screen.ended(conversation.last, stopped=False)

    def _failed(self, why: str, answer: Answer | None) -> None:
        self.failures += 1
        self._screen.failed(why, answer)

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        match name:
            case "/file":
                self._file(Path(os.path.expanduser(rest.strip())))
            case "/system":
                self._conversation.system = rest.strip() or None
                self._screen.note("the system message is set" if rest.strip() else "no system message")
            case "/reset":
                self._conversation.reset()
                self._files.clear()
                self._screen.note("what was said is forgotten")
            case "/help":
                self._screen.note(_HELP)
            case _:
                raise ValueError(
                    f"{name} is no command: /help lists them. A message that begins so: put a space before it"
                )

    def _file(self, path: Path) -> None:
        room = MESSAGE_BYTES - sum(len(text.encode()) for text in self._files)
        try:
            if not path.is_file():
                raise ValueError(f"/file {path}: is no file")
            with path.open("rb") as file:
                data = file.read(room + 1)
        except OSError as error:
            raise ValueError(f"/file {path}: {error.strerror}") from None
        if len(data) > room:
            raise ValueError(f"/file {path}: {_TOO_LONG}")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"/file {path}: is no text in UTF-8") from None
        self._files.append(text)
        self._screen.note(f"{len(text):,} characters of {path} go with the next message")


def typed() -> str | None:
    """A line from the terminal, with editing and a history that is not kept; None at its end."""
    try:
        return _text(input("> ").encode("utf-8", "surrogateescape"))
    except EOFError:
        print()
        return None


def piped() -> str | None:
    """A line of stdin; None at its end. Raises ValueError for one that is too long."""
    line = sys.stdin.buffer.readline(MESSAGE_BYTES + 1)
    if len(line) > MESSAGE_BYTES:
        while line and not line.endswith(b"\n"):
            line = sys.stdin.buffer.readline(MESSAGE_BYTES)
        raise ValueError(f"a line of stdin has more than {MESSAGE_BYTES >> 20} MiB")
    return _text(line.rstrip(b"\r\n")) if line else None


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("that line is no text in UTF-8") from None
