"""The command as a whole, and `tandem router` as a process."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tandem.cli import COMMANDS, INTERRUPTED, main

from .conftest import Tandem
from .local_endpoints import up


def test_its_help_names_every_command(tandem_command: Tandem) -> None:
    done = tandem_command("--help")
    assert done.code == 0
    for name, what in COMMANDS.items():
        assert name in done.out
        assert what in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(tandem_command: Tandem, name: str) -> None:
    done = tandem_command(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: tandem {name} ")


def test_its_version_is_the_distributions(tandem_command: Tandem) -> None:
    assert tandem_command("--version").out == f"tandem {version('tandem-dpd')}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "run an endpoint on this machine"),
        (["downn"], "invalid choice: 'downn'"),
        (["up", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["router", "--engin", "http://e:1"], "unrecognized arguments: --engin http://e:1"),
        (["router", "--decode", "http://d"], "argument --decode: 'http://d' needs a host and a port"),
    ],
)
def test_a_wrong_command_line_is_told_and_has_its_code(
    tandem_command: Tandem, words: list[str], said: str
) -> None:
    done = tandem_command(*words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a number that nothing knows of."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("HOME", "TANDEM_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("words", ["up", "up --detach", "up --dry-run", "status", "logs", "down"])
def test_without_a_home_folder_it_is_told_what_to_set(
    tandem_command: Tandem, manifest: Path, model: Path, words: str
) -> None:
    named = ("-f", manifest, "--model", model) if words.startswith("up") else ()
    done = tandem_command(*words.split(), *named)
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        f"tandem: User {os.getuid()} has no home folder here, so set TANDEM_HOME to a folder for models "
        "and logs.\n"
    )


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_another_does(
    tandem_command: Tandem, manifest: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    assert tandem_command("up", "-f", manifest, "--model", model, "--dry-run").code == 0
    with up():
        assert tandem_command("logs", "router").code == 0
        assert "small at http://127.0.0.1:8000: running" in tandem_command("status").out
    assert tandem_command("down").code == 3


def test_an_unknown_flag_is_told_with_the_usage_of_its_command(tandem_command: Tandem) -> None:
    done = tandem_command("status", "--nonsense")
    assert done.err.startswith("usage: tandem status ")
    assert done.err.endswith("tandem status: error: unrecognized arguments: --nonsense\n")


def test_router_flags_that_contradict_each_other_are_told(tandem_command: Tandem) -> None:
    done = tandem_command("router", "--prefill", "http://p:1")
    assert done.code == 2
    assert done.err.startswith("tandem: --prefill: prefill engines need decode engines to hand over to")


@pytest.mark.parametrize("flag", ["--host", "--admin-host"])
def test_an_empty_host_is_not_everywhere(tandem_command: Tandem, flag: str) -> None:
    done = tandem_command("router", "--engine", "http://e:1", "--port", "0", "--admin-port", "0", flag, "")
    assert done.code == 2
    assert f"argument {flag}: '' is no name or address of a host" in done.err


NOWHERE = "192.0.2.1"  # kept for documentation: no machine has it


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (f"--host {NOWHERE} --port 8000", f"--host {NOWHERE} --port 8000: cannot listen there: "),
        (
            f"--admin-host {NOWHERE} --admin-port 8001",
            f"--admin-host {NOWHERE} --admin-port 8001: cannot listen there: ",
        ),
        (
            f"--connector lmcache --lmcache-buffer-chunks 9 --lmcache-receivers 1:2 "
            f"--lmcache-notify {NOWHERE}:7500",
            f"--lmcache-notify: [Errno 99] cannot listen for notifications at {NOWHERE}:7500",
        ),
        ("--model-path /nowhere", "--model-path: /nowhere is no directory"),
        ("--tokenizer /nowhere", "--tokenizer: /nowhere is no directory"),
    ],
)
def test_what_a_machine_cannot_do_is_told_with_the_flag(
    tandem_command: Tandem, flags: str, named: str
) -> None:
    done = tandem_command("router", "--port", "0", "--decode", "http://127.0.0.1:1", *flags.split())
    assert done.code == 3
    assert f"tandem: {named}" in done.err


def test_flags_without_effect_are_told_when_it_starts(
    tandem_command: Tandem, caplog: pytest.LogCaptureFixture
) -> None:
    flags = f"--engine http://127.0.0.1:1 --kv-events tcp://*:5557 --ramp-up 9 --host {NOWHERE}"
    tandem_command("router", *flags.split())
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "--ramp-up: no effect where no role has a second engine",
        "--kv-events: no effect without --routing-strategy kvaware",
    ]


S3 = str(Path(__file__).parents[1] / "operator/manifests/dpd-s3.yaml")
PRINTING = [
    ["crd"],
    ["render", "-f", S3],
    ["render", "-f", S3, "--json"],
    ["validate", "-f", S3],
    ["validate", "-f", S3, "--json"],
]
printing = pytest.mark.parametrize("words", PRINTING, ids=" ".join)


@printing
def test_a_result_that_cannot_be_written_is_told(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(words) == 3
    assert "tandem: cannot write the result: No space left on device" in capsys.readouterr().err.splitlines()


@printing
def test_whoever_reads_a_result_may_leave(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(words) == 1
    assert "cannot write" not in capsys.readouterr().err


@printing
def test_where_stderr_is_closed_or_full_the_result_is_the_same(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result() -> tuple[int, str]:
        return main(words), capsys.readouterr().out

    usual = result()
    assert (usual[0], bool(usual[1])) == (0, True)
    for name in ("stderr", "stdin"):
        monkeypatch.setattr(sys, name, None)  # what Python has where it was closed
    assert result() == usual
    for opened in (sys.stderr, sys.stdin):
        opened.close()
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        assert result() == usual


def test_a_result_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """Clusters read nothing else."""
    manifest = tmp_path / "endpoint.yaml"
    manifest.write_text(
        Path(S3).read_text("utf-8").replace('"--model"', '"--title", "é", "--model"'), "utf-8"
    )
    command = (sys.executable, "-m", "tandem", "render", "-f", str(manifest))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert "é" in done.stdout.decode("utf-8")


@pytest.mark.parametrize(
    ("redirected", "code"),
    [("> /dev/full", 3), ("| true; exit ${PIPESTATUS[0]}", 1), ("2> /dev/full", 0), (">&- 2>&- <&-", 0)],
)
def test_a_process_ends_with_the_code_that_it_means(redirected: str, code: int) -> None:
    """Python would write once more what is left as it ends, and fail."""
    line = f"{sys.executable} -m tandem crd {redirected}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize(
    ("line", "code"),  # its router does not answer: 1
    [
        ("status", 1),
        ("status --json | true; exit ${PIPESTATUS[0]}", 1),
        ("status > /dev/full", 3),
        ("status --json > /dev/full", 3),
        ("logs > /dev/full", 3),
    ],
)
def test_an_endpoint_is_shown_in_every_locale_and_else_the_reason_is_told(line: str, code: int) -> None:
    with up() as (folder, _):
        (folder / "router.log").write_text("a line\n")
        command = f"PYTHONIOENCODING=ascii {sys.executable} -m tandem {line}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == code, done.stderr
    told = "tandem: cannot write the result: No space left on device\n"
    assert done.stderr == (told if code == 3 else "")


def test_a_terminal_that_is_gone_is_no_reason_for_a_traceback() -> None:
    ours, theirs = os.openpty()
    os.close(ours)
    with open(theirs, "wb") as terminal, up():
        command = (sys.executable, "-m", "tandem", "status")
        done = subprocess.run(
            command, stdout=terminal, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 3
    assert done.stderr == "tandem: cannot write the result: Input/output error\n"


def test_too_few_open_files_are_told_with_what_to_do() -> None:
    line = f"ulimit -n 6; {sys.executable} -m tandem status"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert done.stderr == "tandem: Too many open files: raise the limit, as by `ulimit -n 4096`\n"


async def router(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "tandem", "router", "--decode", "http://127.0.0.1:1", *arguments)
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)


async def test_a_router_without_a_usable_model_says_so(tmp_path: Path) -> None:
    child = await router("--model-path", str(tmp_path / "none"))
    _, err = await child.communicate()
    assert child.returncode == 3
    assert err.decode().startswith(f"tandem: --model-path: {tmp_path / 'none'} ")


async def test_a_router_whose_port_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        child = await router("--port", str(taken.getsockname()[1]))
        _, err = await child.communicate()
    assert child.returncode == 3
    assert b"address already in use" in err


async def test_a_router_runs_until_it_is_told_to_end() -> None:
    child = await router("--port", "0")
    assert child.stderr is not None
    while b"listening on http://127.0.0.1:" not in await child.stderr.readline():
        assert not child.stderr.at_eof()
    child.terminate()
    await child.communicate()
    assert child.returncode == 0


def test_a_containers_first_process_ends_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps a signal from it that it has no handler for."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("os.getpid", lambda: 1)

    def starts(words: object) -> argparse.Namespace:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr("tandem.cli.parse", starts)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["router"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == INTERRUPTED
