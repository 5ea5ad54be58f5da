"""The steps of the images, in a fresh environment: what they install is enough to run."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = "/opt/tandem"


def steps(name: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with what they say."""
    text = (ROOT / f"deploy/images/{name}.Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def built(name: str, folder: Path) -> Path:
    """Follow the first stage; returns the folder that it makes."""
    source, home = folder / "src", folder / "opt"
    source.mkdir()
    for word, rest in steps(name):
        if word == "COPY" and not rest.startswith("--from"):
            *files, target = rest.split()
            for file in files:
                place = source / target / Path(file).name if target.endswith("/") else source / target
                copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copy
                copy(ROOT / file, place)
        elif word == "RUN":
            command = rest.replace(HOME, str(home)).replace("python -m venv", f"{sys.executable} -m venv")
            subprocess.run(["sh", "-ec", command], cwd=source, check=True, timeout=280)
    return home


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["router", "operator"])
def test_what_it_installs_is_enough(name: str, tmp_path: Path) -> None:
    home = built(name, tmp_path)
    said = dict(steps(name))
    assert said["ENTRYPOINT"] == '["tandem"]'
    (command,) = shlex.split(said["CMD"].strip("[]"))
    done = subprocess.run(
        [home / "bin/tandem", command, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    imported = {
        "router": "import tandem.router.app, tandem.router.discovery.kubernetes",
        "operator": "import tandem.operator.process.run",
    }[name]
    subprocess.run([home / "bin/python", "-c", imported], check=True, timeout=60)


@pytest.mark.parametrize("name", ["router", "operator"])
def test_it_does_not_run_as_root(name: str) -> None:
    assert dict(steps(name))["USER"] == "65532:65532"
