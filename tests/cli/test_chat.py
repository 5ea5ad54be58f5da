"""`tandem chat`: from a pipe, for a program, and on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.conversation import Answer
from tandem.cli import chat as chat_command
from tandem.cli.dialogue import figures
from tandem.http import Request, Responder, serve
from tandem.sim import EngineSpec, Fleet, parse

from ..bench.fakes import JSON, SSE, event
from .conftest import Result, Tandem

DONE = b"data: [DONE]\n\n"
FIGURES = r"TTFT [\d,.]+ ms · ITL p50 [\d,.]+ ms, longest [\d,.]+ ms · [\d.]+ tokens/s"


def command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tandem", "chat", *arguments)


async def chat(*arguments: str, said: str | bytes = "", **environment: str) -> Result:
    """The command in a process of its own, so that this one can serve."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *command(*arguments), stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **environment}
    )
    out, err = await child.communicate(said.encode() if isinstance(said, str) else said)
    assert child.returncode is not None
    return Result(child.returncode, out.decode(), err.decode())


class Parrot:
    """An endpoint that says its last message again, word by word, and knows some words of its own."""

    def __init__(self, *, models: tuple[str, ...] = ("m",), key: str = "") -> None:
        self.models = models
        self.key = key
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.gone = asyncio.Event()

    async def __call__(self, request: Request, responder: Responder) -> None:
        if self.key and request.header(b"authorization") != f"Bearer {self.key}".encode():
            responder.send(401, JSON, b'{"error": {"message": "no such key"}}')
        elif request.path == "/v1/models" and self.models:
            cards = [{"id": model} for model in self.models]
            responder.send(200, JSON, json.dumps({"data": cards}).encode())
        elif request.path == "/v1/chat/completions":
            self.asked.append(json.loads(request.body))
            await self.answer(self.asked[-1]["messages"][-1]["content"], responder)
        else:
            responder.send(404, JSON, b'{"detail": "Not Found"}')

    async def answer(self, text: str, responder: Responder) -> None:
        if text == "refuse":
            responder.send(400, JSON, b'{"error": {"message": "this is too long"}}')
            return
        told = [(k.encode(), v.encode()) for k, v in self.headers.items()]
        responder.start(200, [*SSE, *told])
        for word in text.split(" "):
            responder.write(event({"choices": [{"index": 0, "delta": {"content": word + " "}}]}))
        if text == "break off":
            responder.abort()
            return
        if text == "talk on":
            try:
                await asyncio.Event().wait()
            finally:
                self.gone.set()
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        responder.write(
            event({"choices": [choice], "usage": {"prompt_tokens": 1234, "completion_tokens": 9}})
        )
        responder.write(DONE)
        responder.finish()


@asynccontextmanager
async def serving(parrot: Parrot) -> AsyncIterator[str]:
    running = await serve(parrot, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{running.port}"
    finally:
        await running.close()


# From a pipe.


async def test_each_line_is_a_turn_and_figures_are_not_among_the_answers() -> None:
    parrot = Parrot()
    async with serving(parrot) as url:
        done = await chat("--url", url, "--system", "Be brief.", said="one word\n\ntwo\n")
    assert done.code == 0
    assert done.out == "one word \ntwo \n"
    first, second = done.err.splitlines()
    assert re.fullmatch(rf"path unknown · 1,234 prompt tokens · {FIGURES}", first)
    assert second.startswith("path unknown · 1,234 prompt tokens · TTFT ")
    assert parrot.asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one word"},
        {"role": "assistant", "content": "one word "},
        {"role": "user", "content": "two"},
    ]


async def test_the_path_is_the_routers() -> None:
    parrot = Parrot()
    parrot.headers = {"x-tandem-path": "decode_only", "x-tandem-reason": "no_prefiller"}
    async with serving(parrot) as url:
        done = await chat("--url", f"{url}/v1/", said="hello\n")
    assert done.err.startswith("decode only (no prefiller) · 1,234 prompt tokens · TTFT ")


async def test_settings_reach_the_endpoint_and_the_first_model_is_taken() -> None:
    parrot = Parrot(models=("a", "b"))
    async with serving(parrot) as url:
        await chat("--url", url, "--max-tokens", "7", "--temperature", "0", said="x")
        await chat("--url", url, "--model", "b", said="x")
    first, second = parrot.asked
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("a", 7, 0)
    assert second["model"] == "b"
    assert not {"max_tokens", "temperature"} & second.keys()


async def test_as_json_there_is_an_object_for_each_message() -> None:
    async with serving(Parrot()) as url:
        done = await chat("--url", url, "--json", said="one two\nrefuse\nthree\n")
    objects = [json.loads(line) for line in done.out.splitlines()]
    assert [o["answer"] for o in objects] == ["one two ", "", "three "]
    assert [o["error"] for o in objects] == [None, f"{url} answered HTTP 400: this is too long", None]
    assert objects[0]["prompt_tokens"] == 1234
    assert objects[0]["ttft_ms"] > 0
    assert done.code == 1
    assert done.err == f"tandem: {url} answered HTTP 400: this is too long\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("refuse", "answered HTTP 400: this is too long"),
        ("break off", "broke its answer off: "),
    ],
)
async def test_a_turn_that_fails_is_told_and_taken_back_and_the_chat_goes_on(line: str, why: str) -> None:
    parrot = Parrot()
    async with serving(parrot) as url:
        done = await chat("--url", url, said=f"one\n{line}\ntwo\n")
    assert done.code == 1
    assert f"tandem: {url} {why}" in done.err
    assert [m["content"] for m in parrot.asked[2]["messages"]] == ["one", "one ", "two"]


async def test_a_file_goes_with_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("A note.\n")
    parrot = Parrot()
    async with serving(parrot) as url:
        said = f"/file {tmp_path / 'notes.txt'}\nSum it up.\nthanks\n/reset\n /quit\n/quit\nnever\n"
        done = await chat("--url", url, said=said)
    assert done.code == 0
    assert [asked["messages"][-1]["content"] for asked in parrot.asked] == [
        "A note.\n\n\nSum it up.",
        "thanks",
        "/quit",  # with a space before it: a message
    ]
    assert len(parrot.asked[2]["messages"]) == 1
    assert f"8 characters of {tmp_path / 'notes.txt'} go with the next message\n" in done.err


async def test_the_system_message_can_be_changed() -> None:
    parrot = Parrot()
    async with serving(parrot) as url:
        await chat("--url", url, said="/system Be kind.\none\n/system\ntwo\n")
    assert parrot.asked[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert parrot.asked[1]["messages"][0] == {"role": "user", "content": "one"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"/fil x", "/fil is no command: /help lists them"),
        (b"/file /nowhere/x", "/file /nowhere/x: is no file"),
        (b"/file /tmp", "/file /tmp: is no file"),
        (b"/file /dev/zero", "/file /dev/zero: is no file"),
        (b"\xff\xfe", "that line is no text in UTF-8"),
    ],
)
async def test_a_line_that_cannot_be_taken_is_told(line: bytes, why: str) -> None:
    parrot = Parrot()
    async with serving(parrot) as url:
        done = await chat("--url", url, said=line + b"\nhello\n")
    assert done.code == 1
    assert done.err.startswith(f"tandem: {why}")
    assert done.out == "hello \n"


async def test_files_and_lines_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * (5 << 20))
    (tmp_path / "odd").write_bytes(b"\xff")
    file = f"/file {tmp_path / 'long'}\n"
    parrot = Parrot()
    async with serving(parrot) as url:
        said = f"{file}{file}/file {tmp_path / 'odd'}\n{'x' * (4 << 20)}\n{'y' * (9 << 20)}\nhello\n"
        done = await chat("--url", url, said=said)
    assert done.code == 1
    assert [line for line in done.err.splitlines() if line.startswith("tandem: ")] == [
        f"tandem: /file {tmp_path / 'long'}: a message may have 8 MiB, files included",
        f"tandem: /file {tmp_path / 'odd'}: is no text in UTF-8",
        "tandem: a message may have 8 MiB, files included",
        "tandem: a line of stdin has more than 8 MiB",
    ]
    assert [asked["messages"][-1]["content"] for asked in parrot.asked] == ["hello"]


async def test_the_key_is_sent_and_a_wrong_one_is_told() -> None:
    async with serving(Parrot(key="s3cret")) as url:
        assert (await chat("--url", url, "--api-key", "s3cret", said="hello\n")).out == "hello \n"
        assert (await chat("--url", url, said="hello\n", TANDEM_API_KEY="s3cret")).out == "hello \n"
        done = await chat("--url", url, "--model", "m", said="hello\n")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"tandem: {url}/v1/models answered HTTP 401: no such key. Give the endpoint's key by --api-key.\n"
    )


async def test_an_endpoint_that_lists_no_models_needs_a_name() -> None:
    async with serving(Parrot(models=())) as url:
        done = await chat("--url", url, said="hello\n")
        assert (done.code, done.err) == (1, f"tandem: {url}/v1/models answered HTTP 404: Not Found\n")
        assert (await chat("--url", url, "--model", "m", said="hello\n")).out == "hello \n"


class Dripping(Parrot):
    """Never comes to an end of what it says first, be it the list of models."""

    async def __call__(self, request: Request, responder: Responder) -> None:
        responder.start(200, JSON)
        self.asked.append({})
        while True:
            responder.write(b" ")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("named", [(), ("--model", "m")], ids=["any", "named"])
async def test_a_list_of_models_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tandem_command: Tandem, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(chat_command, "_LIST_SECONDS", 1.0)
    async with serving(Dripping()) as url:
        done = await asyncio.to_thread(tandem_command, "chat", "--url", url, *named)
    assert (done.code, done.out) == (3, "")
    assert done.err == f"tandem: {url} has not listed its models within 1 s\n"


async def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    async with serving(Parrot(models=("a", "b"))) as url:
        done = await chat("--url", url, "--model", "c", said="hello\n")
    assert (done.code, done.err) == (2, f"tandem: --model c: {url} serves a, b\n")


async def test_whoever_reads_the_answers_may_have_enough() -> None:
    async with serving(Parrot()) as url:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command("--url", url), stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"one\n")
        await child.stdout.readline()
        child.stdout._transport.close()  # type: ignore[attr-defined]
        _, err = await child.communicate(b"two\nthree\n")
    assert child.returncode == 1
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--url", "ftp://x"], 2, "tandem: --url ftp://x: is not of the form http://HOST:PORT"),
        (["--url", "http://x/\x85"], 2, "tandem: --url http://x/\x85: is not of the form"),
        (["--url", "http://x:y"], 2, "tandem: --url http://x:y: Invalid port"),
        (["--api-key", "a\nb"], 2, "tandem: --api-key or TANDEM_API_KEY: a key has printable ASCII"),
        (["--max-tokens", "0"], 2, "'0' is not a whole number greater than 0"),
        (["--temperature", "nan"], 2, "'nan' is not a number from 0 on"),
        (["--temperature", "-1"], 2, "'-1' is not a number from 0 on"),
        (
            ["--url", "http://127.0.0.1:1"],
            3,
            "tandem: http://127.0.0.1:1 cannot be reached: ",
        ),
    ],
)
def test_what_keeps_it_from_talking_has_its_code(
    tandem_command: Tandem, words: list[str], code: int, said: str
) -> None:
    done = tandem_command("chat", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (Answer(), "path unknown"),
        (Answer(times=[0.25], finish_reason="length"), "path unknown · TTFT 250 ms · cut off at its longest"),
        (
            Answer(
                headers={"x-tandem-path": "disaggregated", "x-tandem-reason": "threshold"},
                times=[3.329, 3.379, 3.439],
                prompt_tokens=1604,
                completion_tokens=3,
            ),
            "disaggregated (threshold) · 1,604 prompt tokens · TTFT 3,329 ms · "
            "ITL p50 55.0 ms, longest 60.0 ms · 18.2 tokens/s",
        ),
    ],
)
def test_the_line_of_figures_has_what_is_known(answer: Answer, shown: str) -> None:
    assert figures(answer) == shown


def test_an_answer_that_is_stopped_says_so() -> None:
    assert figures(Answer(), stopped=True) == "stopped before its first token"
    assert figures(Answer(times=[0.25]), stopped=True) == "path unknown · TTFT 250 ms · stopped"


async def test_an_engine_without_a_router_can_be_talked_to() -> None:
    flags = ["--model", "m", "--served-model-name", "sim"]
    async with Fleet([EngineSpec(parse(flags))], environment={}, answer_tokens=(6, 6)) as fleet:
        done = await chat("--url", fleet.urls[0], "--json", said="What is it?\nAnd then?\n")
    one, two = map(json.loads, done.out.splitlines())
    assert (one["path"], one["error"], one["completion_tokens"]) == (None, None, two["completion_tokens"])
    assert two["prompt_tokens"] > one["prompt_tokens"] + one["completion_tokens"]


# On a terminal.


class Terminal:
    """A pseudo-terminal with the command on it."""

    def __init__(self, master: int, child: asyncio.subprocess.Process) -> None:
        self.shown = ""
        self._master = master
        self._child = child
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    @classmethod
    @asynccontextmanager
    async def open(cls, *arguments: str) -> AsyncIterator[Terminal]:
        master, slave = pty.openpty()
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST  # lines end as they are written
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        child = await asyncio.create_subprocess_exec(
            *command(*arguments), stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        terminal = cls(master, child)
        try:
            yield terminal
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
            asyncio.get_running_loop().remove_reader(master)
            os.close(master)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self.shown += data.decode("utf-8", "replace")
        self._news.set()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        self._child.send_signal(signal.SIGINT)

    async def interrupted(self, pattern: str) -> None:
        """Interrupt it until it shows the pattern: between the writing of its prompt and the wait for keys
        Python keeps an interrupt for the next key."""
        while True:
            self.interrupt()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self.shows(pattern)
                return

    async def shows(self, pattern: str) -> str:
        """Wait for it; returns what came up to its end, which is then forgotten."""
        while (found := re.search(pattern, self.shown)) is None:
            self._news.clear()
            await self._news.wait()
        came, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return came

    async def ends(self) -> int:
        return await self._child.wait()


async def test_on_a_terminal_answers_and_figures_follow_each_other() -> None:
    async with serving(Parrot()) as url, Terminal.open("--url", url) as terminal:
        await terminal.shows(rf"m at {url}; /help lists the commands, Ctrl-D ends\s+> ")
        terminal.type("good day\n")
        await terminal.shows(rf"good day \npath unknown · 1,234 prompt tokens · {FIGURES}\n\n> ")
        terminal.type("/help\n")
        await terminal.shows(r"/file PATH .*\n(.*\n)+> ")
        terminal.type("refuse\n")
        await terminal.shows(r"HTTP 400: this is too long The turn was taken back\.\n\n> ")
        terminal.type("\x04")
        assert await terminal.ends() == 0


async def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    parrot = Parrot()
    async with serving(parrot) as url, Terminal.open("--url", url) as terminal:
        await terminal.shows("> ")
        terminal.type("talk on\n")
        await terminal.shows("talk on ")  # with a space: the answer, not the echo
        terminal.interrupt()
        await terminal.shows(r"path unknown · .*stopped\n\n> ")
        await parrot.gone.wait()
        await terminal.interrupted("/quit or Ctrl-D ends the chat\n")
        terminal.type("again\n")
        await terminal.shows(r"again \npath unknown")
        assert [m["content"] for m in parrot.asked[1]["messages"]] == ["talk on", "talk on ", "again"]
        terminal.type("/quit\n")
        assert await terminal.ends() == 0


async def test_an_answer_cannot_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("red\x1b[31m \x9b31m\x07 end")
    async with serving(Parrot()) as url, Terminal.open("--url", url) as terminal:
        await terminal.shows("> ")
        terminal.type(f"/file {tmp_path / 'f'}\n")
        await terminal.shows("next message\n")
        terminal.type("x\n")
        came = await terminal.shows(r"tokens/s")
    assert "red�[31m �31m� end" in came
    assert "\x1b" not in came


async def test_it_can_be_interrupted_before_it_has_begun() -> None:
    dripping = Dripping()
    async with serving(dripping) as url:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command("--url", url), stdin=pipe, stdout=pipe, stderr=pipe
        )
        while not dripping.asked:
            await asyncio.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, err = await child.communicate()
    assert (child.returncode, out, err) == (130, b"", b"")


async def test_a_pipe_that_nobody_reads_can_be_interrupted() -> None:
    reading, writing = os.pipe()
    async with serving(Parrot()) as url:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command("--url", url), stdin=pipe, stdout=writing, stderr=pipe
        )
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(b"one " * 100_000 + b"\n")
        while select.select([], [writing], [], 0)[1]:  # there is room in it
            await asyncio.sleep(0.01)
        while child.returncode is None:
            child.send_signal(signal.SIGINT)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await child.wait()
        err = await child.stderr.read()
        child.stdin.close()
    os.close(reading)
    os.close(writing)
    assert child.returncode == 130
    assert re.fullmatch(rb"path unknown .* stopped\n", err)


async def test_a_pipe_that_is_interrupted_ends() -> None:
    async with serving(Parrot()) as url:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command("--url", url), stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"talk on\n")
        await child.stdout.readexactly(len("talk on "))
        child.send_signal(signal.SIGINT)
        out, err = await child.communicate()
    assert child.returncode == 130
    assert out == b"\n"
    assert b"stopped" in err
    assert b"Traceback" not in err
