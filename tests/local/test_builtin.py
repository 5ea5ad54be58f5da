"""The built-in model: made once, whole or not at all, and made again when it is damaged.

The converter is a fake that notes each of its runs; everything else is real.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.local import builtin
from tandem.local.errors import LocalError

from .processes import eventually, gone

CONVERT = Path(builtin.convert.__file__)
# Arguments: a GGUF file and a folder. What it does is written in the GGUF file.
CONVERTER = """
import os, signal, sys, time
from pathlib import Path

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
with (source.parent / "runs").open("a") as runs:
    runs.write(f"{os.getpid()}\\n")
(folder / "config.json").write_text("{}")
order = source.read_text()
if order == "fail":
    sys.exit("ValueError: this is no GGUF file")
if order == "be killed":
    os.kill(os.getpid(), signal.SIGKILL)
if order == "hang":
    signal.pause()
if order == "wait":
    while not (source.parent / "go").exists():
        time.sleep(0.005)
(folder / "model.safetensors").write_text("weights")
"""
RUN = """
import signal, sys
from pathlib import Path
from tandem.local import builtin

signal.signal(signal.SIGINT, signal.default_int_handler)
home = Path(sys.argv[1])
builtin.convert.__file__ = str(home / "converter.py")
builtin.find_gguf = lambda: home / "model.gguf"
print("begins", flush=True)
print(builtin.builtin_model(home / "cache", sys.executable))
"""


class Home:
    """A cache, a GGUF file and the fake converter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.converter = folder / "converter.py"
        self.converter.write_text(CONVERTER)
        self.order("convert")

    def order(self, what: str) -> None:
        (self.folder / "model.gguf").write_text(what)

    @property
    def runs(self) -> list[int]:
        """The process id of each run of the converter."""
        file = self.folder / "runs"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def make(self) -> Path:
        return builtin.builtin_model(self.cache, sys.executable)

    def start(self) -> subprocess.Popen[str]:
        """The same in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(self.folder)], stdout=subprocess.PIPE, text=True
        )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(builtin.convert, "__file__", str(tmp_path / "converter.py"))
    monkeypatch.setattr(builtin, "find_gguf", lambda: tmp_path / "model.gguf")
    return Home(tmp_path)


def test_it_is_converted_on_first_use_and_then_found(home: Home) -> None:
    folder = home.make()
    assert (folder / "model.safetensors").read_text() == "weights"
    assert home.make() == folder
    assert len(home.runs) == 1


@pytest.mark.parametrize("damage", ["changed", "missing", "no checksums", "empty checksums"])
def test_a_damaged_copy_is_made_again(home: Home, damage: str) -> None:
    folder = home.make()
    match damage:
        case "changed":
            (folder / "model.safetensors").write_text("weighty")
        case "missing":
            (folder / "model.safetensors").unlink()
        case "no checksums":
            (folder / "checksums.json").unlink()
        case _:
            (folder / "checksums.json").write_text("{}")
    assert not builtin.is_whole(folder)
    assert (home.make() / "model.safetensors").read_text() == "weights"
    assert builtin.is_whole(folder)
    assert len(home.runs) == 2


@pytest.mark.parametrize(
    ("order", "said"), [("fail", "(exit 1):\nValueError: this is no GGUF file"), ("be killed", "(exit -9)")]
)
def test_a_conversion_that_fails_says_why_and_leaves_nothing(home: Home, order: str, said: str) -> None:
    home.order(order)
    with pytest.raises(LocalError) as error:
        home.make()
    assert said in str(error.value)
    assert [p.name for p in home.cache.iterdir()] == ["smollm2-135m-instruct-bf16.lock"]
    home.order("convert")
    assert builtin.is_whole(home.make())


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_run_that_is_ended_ends_the_conversion_and_the_next_one_begins_anew(
    home: Home, ending: signal.Signals
) -> None:
    (home.folder / "torch.py").write_text(CONVERTER)  # the real converter imports it, and it hangs
    shutil.copy(CONVERT, home.converter)
    home.order("hang")
    with home.start() as ended:
        await eventually(lambda: home.runs)
        ended.send_signal(ending)
    await eventually(lambda: gone(home.runs[0]))
    assert not builtin.builtin_folder(home.cache).exists()
    home.converter.write_text(CONVERTER)
    home.order("convert")
    folder = home.make()
    assert builtin.is_whole(folder)
    assert {p.name for p in home.cache.iterdir()} == {folder.name, f"{folder.name}.lock"}


async def test_two_at_once_convert_once(home: Home) -> None:
    home.order("wait")
    with home.start() as first:
        await eventually(lambda: home.runs)
        with home.start() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "begins\n"
            (home.folder / "go").touch()
            outputs = {first.communicate()[0].split()[-1], second.communicate()[0].split()[-1]}
    assert len(outputs) == 1
    assert builtin.is_whole(Path(outputs.pop()))
    assert len(home.runs) == 1


def test_a_cache_that_cannot_be_written_is_told(home: Home) -> None:
    home.cache.write_text("a file where the folder should be")
    with pytest.raises(LocalError, match=f"Cannot write the converted model into {home.cache}: "):
        home.make()


def test_without_its_package_the_ways_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(LocalError, match=r"not installed.*make setup.*tandem up --model PATH"):
        builtin.find_gguf()


def test_the_source_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / builtin._GGUF).touch()
    monkeypatch.setattr(builtin, "_PACKAGE", package.name)
    monkeypatch.syspath_prepend(tmp_path)
    assert builtin.find_gguf() == package / builtin._GGUF
