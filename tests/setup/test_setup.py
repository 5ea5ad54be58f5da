"""Set-up: what is said where the engine stack cannot be had, and that nothing is done twice."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup.py"
CPUINFO = "processor : 0\nflags : fpu sse4_2 avx avx2 fma\n"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with an environment of its own to set up."""
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(module, "ENGINE_LIST", tmp_path / "engine-cpu.txt")
    (tmp_path / "engine-cpu.txt").write_text("# pinned\ntorch==1+cpu\nvllm-cpu==2\n")
    return module


@pytest.mark.parametrize(
    ("system", "machine", "version", "cpuinfo"),
    [("Linux", "x86_64", (3, 11), CPUINFO), ("Linux", "x86_64", (3, 13), CPUINFO)],
)
def test_a_machine_that_can_run_the_stack_is_not_refused(
    setup: ModuleType, system: str, machine: str, version: tuple[int, int], cpuinfo: str
) -> None:
    assert setup.why_unsupported(system, machine, version, cpuinfo) is None


@pytest.mark.parametrize(
    ("system", "machine", "version", "cpuinfo", "why", "way_out"),
    [
        ("Linux", "aarch64", (3, 11), CPUINFO, "not for aarch64", "VLLM_PYTHON="),
        ("Darwin", "arm64", (3, 11), "", "for Linux only, not for Darwin", "VLLM_PYTHON="),
        ("Windows", "AMD64", (3, 11), "", "for Linux only, not for Windows", "VLLM_PYTHON="),
        ("Linux", "x86_64", (3, 11), "flags : sse4_2 avx\n", "has no AVX2", "VLLM_PYTHON="),
        ("Linux", "x86_64", (3, 11), "flags : avx2x\n", "has no AVX2", "VLLM_PYTHON="),
        ("Linux", "x86_64", (3, 10), CPUINFO, "Python 3.10 is not supported", "make setup PYTHON="),
        ("Linux", "x86_64", (3, 14), CPUINFO, "Python 3.14 is not supported", "make setup PYTHON="),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why_and_what_to_do(
    setup: ModuleType,
    system: str,
    machine: str,
    version: tuple[int, int],
    cpuinfo: str,
    why: str,
    way_out: str,
) -> None:
    said = setup.why_unsupported(system, machine, version, cpuinfo)
    assert why in said
    assert way_out in said


NO_TORCH = """\
Collecting torch==2.9.0+cpu
ERROR: Could not find a version that satisfies the requirement torch==2.9.0+cpu (from versions: 2.9.0)
ERROR: No matching distribution found for torch==2.9.0+cpu
"""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (NO_TORCH, "make setup PIP_EXTRA_INDEX_URL=ADDRESS"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "The disk is full"),
        ("ERROR: Could not connect to the index\n", "pip failed:"),
    ],
)
def test_a_failure_of_pip_is_explained_with_its_last_words(setup: ModuleType, output: str, said: str) -> None:
    explained = setup.explain_pip_failure("Collecting a\n" * 1000 + "WARNING: a newer pip exists\n" + output)
    assert said in explained
    assert output.splitlines()[-1] in explained
    assert "newer pip" not in explained
    assert len(explained) < 2500


def test_a_step_runs_once_and_again_when_its_state_changes(setup: ModuleType) -> None:
    def runs(state: str) -> bool:
        with setup.once("engine", state) as needed:
            return bool(needed)

    assert [runs(s) for s in ("a", "a", "b", "b", "a")] == [True, False, True, False, True]


def test_a_step_that_failed_runs_again(setup: ModuleType) -> None:
    ran: list[str] = []

    def fail(state: str) -> None:
        with setup.once("engine", state) as needed:
            if needed:
                ran.append(state)
                raise KeyError

    with setup.once("engine", "a"):
        pass
    for state in ("b", "b", "a"):  # nor does "a" count as done: what the failed run left is not known
        with pytest.raises(KeyError):
            fail(state)
    assert ran == ["b", "b", "a"]


def test_the_state_follows_the_content_of_files(setup: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    second.write_text("1")
    before = setup.digest(first)
    assert before == setup.digest(second)
    first.write_text("2")
    assert before != setup.digest(first)


# pip, in whose place a shell script stands.

Pip = Callable[[str], Path]


@pytest.fixture
def pip(tmp_path: Path) -> Pip:
    """Make an interpreter whose pip prints something and ends; it notes its arguments."""

    def make(script: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\n{script}\n')
        python.chmod(0o755)
        return python

    return make


def test_pip_is_run_and_its_end_told(
    setup: ModuleType, pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.pip_install(
        pip("echo Collecting a; echo Installing collected packages"), "the stack", "--no-deps", "a"
    )
    out, err = capsys.readouterr()
    assert (tmp_path / "asked").read_text() == "-m pip install --progress-bar off --no-deps a\n"
    assert out == ""
    assert err.startswith("the stack: done in ")


def test_a_failing_pip_ends_the_set_up_in_words(setup: ModuleType, pip: Pip) -> None:
    with pytest.raises(setup.CannotSetUp, match="The disk is full"):
        setup.pip_install(pip("echo 'No space left on device' >&2; exit 1"), "the stack", "a")


def test_the_steps_are_taken_once_and_each_again_when_it_must(
    setup: ModuleType, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = pip("exit 0")
    monkeypatch.setattr(setup, "make_venv", lambda: python)
    monkeypatch.setattr(setup, "unsupported_here", lambda: None)
    monkeypatch.setattr(setup, "gpu_vllm", lambda: False)

    def asked(**options: object) -> list[str]:
        (tmp_path / "asked").write_text("")
        setup.set_up(**{"dev": False, "vllm_python": None, **options})
        return [line.split()[-1] for line in (tmp_path / "asked").read_text().splitlines()]

    engines = str(setup.ENGINE_LIST)
    assert asked() == [engines, ".[local]"]
    assert asked() == []
    assert asked(dev=True) == [".[dev]"]
    assert asked() == asked(dev=True) == []
    setup.ENGINE_LIST.write_text("torch==2+cpu\n")
    assert asked() == [engines, ".[local]"]


def test_a_vllm_of_ones_own_is_used_instead_and_remembered(
    setup: ModuleType, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "make_venv", lambda: pip("exit 0"))
    monkeypatch.setattr(setup, "unsupported_here", lambda: "an arm64 machine")
    setup.set_up(dev=False, vllm_python="/gpu/bin/python")
    assert (tmp_path / "asked").read_text().splitlines()[0].endswith(".[local]")
    assert (setup.VENV / "vllm-python").read_text() == "/gpu/bin/python"
    with pytest.raises(setup.CannotSetUp, match=r"The tests run the CPU engines\. an arm64 machine"):
        setup.set_up(dev=True, vllm_python="/gpu/bin/python")


def test_a_gpu_build_that_is_installed_is_used(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"vllm": "0.32.0"}

    def version(name: str) -> str:
        try:
            return found[name]
        except KeyError:
            raise setup.importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(setup.importlib.metadata, "version", version)
    monkeypatch.setattr(setup.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert setup.gpu_vllm()
    found["vllm"] = "0.32.0+cpu"
    assert not setup.gpu_vllm()
    found.clear()
    assert not setup.gpu_vllm()
    found["vllm"] = "0.32.0"
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert not setup.gpu_vllm()


def test_an_interpreter_that_vanished_is_not_one(setup: ModuleType, tmp_path: Path) -> None:
    assert setup.runs(Path(sys.executable))
    assert not setup.runs(tmp_path / "none")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 3.9.1\n")
    other.chmod(0o755)
    assert not setup.runs(other)


def test_what_this_machine_lacks_has_its_own_exit_code(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "unsupported_here", lambda: "This processor has no AVX2.")
    monkeypatch.setattr(setup, "gpu_vllm", lambda: False)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.delitem(os.environ, "VLLM_PYTHON", raising=False)
    assert setup.main() == 3
    assert capsys.readouterr().err == "setup: This processor has no AVX2.\n"
