"""`tandem up` and `tandem demo` before anything is started: what a person sees of each thing that would keep
an endpoint from starting, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tandem.engine
from tandem.engine import Machine
from tandem.local import builtin, endpoint, folders, ports, preflight

from ..local.models import model_folder, safetensors
from .conftest import MANIFEST, Tandem

USAGE, ENVIRONMENT = 2, 3


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def running(*arguments: object, **options: object) -> None:
        pytest.fail("processes were started")

    monkeypatch.setattr(endpoint, "running", running)


# The model


Break = Callable[[Path], None]


def cut_short(model: Path) -> None:
    (model / "model.safetensors").write_bytes(safetensors()[:-2])


def pointer(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def tokenizer_pointer(model: Path) -> None:
    (model / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def without(name: str) -> Break:
    return lambda model: (model / name).unlink()


def gguf_only(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.Q4.gguf")


def config(text: str) -> Break:
    def write(model: Path) -> None:
        (model / "config.json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            shutil.rmtree,
            "--model: {model} is not a folder on this machine. Models are not downloaded; put one",
        ),
        (
            without("config.json"),
            "--model: {model} has no config.json; it must be a Hugging Face model folder.",
        ),
        (without("tokenizer.json"), "--model: {model} has no tokenizer.json; it must be"),
        (
            without("model.safetensors"),
            "{model} has no weights (*.safetensors or *.bin): the download is not",
        ),
        (gguf_only, "{model} has its weights as GGUF only, which vLLM does not read"),
        (
            cut_short,
            "{model}/model.safetensors has 124 bytes and its header tells of 126: the download was cut",
        ),
        (
            pointer,
            "{model}/model.safetensors is a Git LFS pointer and not the file itself: run `git lfs pull`",
        ),
        (
            tokenizer_pointer,
            "{model}/tokenizer.json is a Git LFS pointer and not the file itself: run `git lfs",
        ),
        (config("{"), "{model}/config.json is not JSON: "),
        (config("[]"), "{model}/config.json is not a model's config.json: it holds no object"),
        (config("{}"), "{model}/config.json names no architecture ("),
    ],
)
def test_a_folder_that_is_no_whole_model_is_told(
    tandem_command: Tandem, model: Path, broken: Break, said: str
) -> None:
    broken(model)
    done = tandem_command("up", "--model", model)
    assert (done.code, done.out) == (USAGE, "")
    assert done.err.startswith(f"tandem: {said.format(model=model)}")
    assert len(done.err.splitlines()) == 1


def test_a_file_in_the_place_of_a_folder_is_told(tandem_command: Tandem, model: Path) -> None:
    gguf = model / "m.gguf"
    gguf.write_bytes(b"GGUF\x03")
    done = tandem_command("up", "--model", gguf)
    assert done.code == USAGE
    assert done.err.startswith(f"tandem: --model: {gguf} is a GGUF file, which vLLM does not read. Name the")
    weights = model / "model.safetensors"
    done = tandem_command("up", "--model", weights)
    assert done.err == f"tandem: --model: {weights} is a file. Name the folder that it lies in, {model}.\n"
    assert done.code == USAGE
    os.mkfifo(model / "pipe")
    assert "is not a folder on this machine" in tandem_command("up", "--model", model / "pipe").err


def test_the_folder_that_was_probably_meant_is_named(tandem_command: Tandem, tmp_path: Path) -> None:
    cached = tmp_path / "models--org--name" / "snapshots"
    cached.mkdir(parents=True)
    meant = model_folder(cached / "0a1b2c")
    done = tandem_command("up", "--model", cached.parent)
    assert done.code == USAGE
    assert done.err.endswith(f" Did you mean {meant}?\n")


def test_a_load_format_without_files_needs_none(tandem_command: Tandem, manifest: Path, model: Path) -> None:
    """Weights made up by the engine, to try things with."""
    (model / "model.safetensors").unlink()
    manifest.write_text(
        MANIFEST.replace("    image: vllm\n", "    image: vllm\n    args: [--load-format, dummy]\n")
    )
    with pytest.raises(pytest.fail.Exception, match="processes were started"):
        tandem_command("up", "-f", manifest, "--model", model)


# Flags that do not fit the model


def test_flags_that_vllm_would_refuse_are_told_by_their_field(
    tandem_command: Tandem, manifest: Path, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    model = model_folder(tmp_path / "m", **shape)
    args = "args: [--max-model-len=9k, --kv-cache-memory-bytes, '1048576', --chat-template, /nowhere.jinja]"
    manifest.write_text(MANIFEST.replace("    image: vllm\n", f"    image: vllm\n    {args}\n"))
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert (done.code, done.out) == (USAGE, "")
    assert [line[:60] for line in done.err.splitlines()] == [
        "tandem: 3 things keep the endpoint from starting:",
        "- spec.worker.args: --max-model-len 9000: the model's contex",
        "- spec.worker.args: --kv-cache-memory-bytes: 1 MiB of KV cac",
        "- spec.worker.args: --chat-template /nowhere.jinja: there is",
    ]


# Memory


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch, machine: None) -> None:
    """One on which two engines do not fit."""
    detect = tandem.engine.detect

    def small(python: str) -> Machine:
        return replace(detect(python), memory_bytes=1 << 30)

    monkeypatch.setattr(tandem.engine, "detect", small)


@pytest.mark.usefixtures("small_machine")
def test_too_little_memory_is_told_with_the_figures(
    tandem_command: Tandem, manifest: Path, model: Path
) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.write(safetensors(0))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1 << 29], "data_offsets": [0, 1 << 30]}}).encode()
    with (model / "model.safetensors").open("wb") as file:  # a file with a hole: it takes no disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert (done.code, done.out) == (ENVIRONMENT, "")
    own = preflight.Need("", 0, 0).own / (1 << 30)
    each = f"{1 + 1 / 8 + own:.1f} GiB (weights 1.0 GiB, KV cache 0.1 GiB, its process {own:.1f} GiB)"
    assert done.err.startswith(
        f"tandem: The engines take {2 * (1 + 1 / 8 + own):.1f} GiB of memory and 1.0 GiB are available: "
        f"1 × prefill {each}; 1 × decode {each}. Use fewer replicas (spec.pdSpec), a smaller "
        "--kv-cache-memory-bytes (spec.worker.args) or a smaller model, or end other programs; "
        "--no-memory-check starts them all the same."
    )


def test_what_the_machine_can_be_given_counts_and_not_what_it_has_now(
    tandem_command: Tandem, manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detect = tandem.engine.detect

    def growing(python: str) -> Machine:
        return replace(detect(python), memory_bytes=1 << 30, obtainable_bytes=16 << 30)

    monkeypatch.setattr(tandem.engine, "detect", growing)
    with pytest.raises(pytest.fail.Exception, match="processes were started"):
        tandem_command("up", "-f", manifest, "--model", model)


@pytest.mark.usefixtures("small_machine")
def test_who_knows_better_starts_it_all_the_same(tandem_command: Tandem, manifest: Path, model: Path) -> None:
    assert tandem_command("up", "-f", manifest, "--model", model).code == ENVIRONMENT
    with pytest.raises(pytest.fail.Exception, match="processes were started"):
        tandem_command("up", "-f", manifest, "--model", model, "--no-memory-check")


# Ports


@pytest.fixture
def real_ports(monkeypatch: pytest.MonkeyPatch, machine: None) -> None:
    monkeypatch.setattr(preflight, "require_free", ports.require_free)


LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening() -> Iterator[Callable[..., tuple[int, int]]]:
    """Starts a process that listens, with further words on its command line: its pid and its port."""
    started = []

    def start(*words: str, code: str = LISTEN) -> tuple[int, int]:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        return child.pid, int(child.stdout.readline())

    yield start
    for child in started:
        child.communicate()


@pytest.mark.usefixtures("real_ports")
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_port_that_another_program_has_is_told_with_its_name(
    tandem_command: Tandem, manifest: Path, model: Path, listening: Any, command: str
) -> None:
    pid, port = listening("a program of theirs")
    done = tandem_command(command, "-f", manifest, "--model", model, "--port", port)
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert done.err.startswith(
        f"tandem: Port {port} of 127.0.0.1 is taken (process {pid}: {sys.executable} -c"
    )
    assert done.err.endswith("). Stop it, or choose another port with --port.\n")


@pytest.mark.usefixtures("real_ports")
def test_a_port_that_another_endpoint_has_is_told_with_how_to_prove_that_one(
    tandem_command: Tandem, manifest: Path, model: Path, listening: Any
) -> None:
    router = [sys.executable, "-c", LISTEN, "-m", "tandem", "router"]
    up = ["bin/tandem", "up", "-f", "other.yaml"]
    pid, port = listening(*up, code=f"import subprocess; subprocess.run({router!r})")
    done = tandem_command("up", "-f", manifest, "--model", model, "--port", port)
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert f"by another endpoint (process {pid}: tandem up -f other.yaml). Stop that one, " in done.err
    assert f"prove that one with `tandem demo --url http://127.0.0.1:{port}`." in done.err


@pytest.mark.usefixtures("real_ports")
def test_a_port_whose_holder_cannot_be_seen_is_taken_all_the_same(
    tandem_command: Tandem, manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "listener", lambda port: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tandem_command("up", "-f", manifest, "--model", model, "--port", port)
    assert done.err == (
        f"tandem: Port {port} of 127.0.0.1 is taken by another program. Choose another with --port.\n"
    )
    assert done.code == ENVIRONMENT


@pytest.mark.usefixtures("real_ports")
@pytest.mark.parametrize("words", [("up",), ("demo",), ("demo", "--port", "8000")], ids=" ".join)
def test_an_address_that_is_not_this_machines_is_told(
    tandem_command: Tandem, manifest: Path, model: Path, words: tuple[str, ...]
) -> None:
    done = tandem_command(*words, "-f", manifest, "--model", model, "--host", "192.0.2.1")
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert done.err.startswith("tandem: Cannot listen on 192.0.2.1")


# Folders and disks


def test_logs_that_cannot_be_written_are_told(
    tandem_command: Tandem, manifest: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert done.err.startswith(f"tandem: Cannot write logs into {tmp_path}/home/small/8000: ")
    assert done.err.endswith("Make room or mend its rights, or set TANDEM_HOME to a folder elsewhere.\n")


def test_a_full_disk_is_told(
    tandem_command: Tandem, manifest: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders.os, "fsync", full)
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert done.code == ENVIRONMENT
    assert done.err == (
        f"tandem: Cannot write logs into {tmp_path}/home/small/8000: No space left on device. Make room or "
        "mend its rights, or set TANDEM_HOME to a folder elsewhere.\n"
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the built-in model, as though it were installed."""
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr(builtin, "find_gguf", lambda: file)
    return file


@pytest.mark.usefixtures("source")
def test_a_conversion_without_room_is_not_begun(
    tandem_command: Tandem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000_000)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda folder: usage)
    done = tandem_command("up")
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert done.err == (
        f"tandem: There is no room for the converted model in {tmp_path}/home/models: it takes 274 MB, and "
        "the disk has 100 MB left. Make room or mend its rights, or set TANDEM_HOME to a folder elsewhere.\n"
    )


@pytest.mark.usefixtures("source")
def test_a_conversion_that_fills_the_disk_is_told_and_leaves_nothing(
    tandem_command: Tandem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter = tmp_path / "converter.py"
    converter.write_text(
        "import sys\nfrom pathlib import Path\n(Path(sys.argv[2]) / 'model.safetensors').write_text('half')\n"
        "sys.exit('SafetensorError: I/O error: No space left on device (os error 28)')"
    )
    monkeypatch.setattr(builtin.convert, "__file__", str(converter))
    done = tandem_command("up", "--vllm-python", sys.executable)
    assert (done.code, done.out) == (ENVIRONMENT, "")
    cache = tmp_path / "home" / "models"
    assert f"tandem: Cannot write the converted model into {cache}: [Errno 28] No space left" in done.err
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


# Everything at once


@pytest.mark.usefixtures("real_ports", "small_machine")
def test_all_that_is_wrong_is_told_at_once(
    tandem_command: Tandem, manifest: Path, model: Path, tmp_path: Path, listening: Any
) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    cut_short(model)
    _, port = listening()
    done = tandem_command("up", "-f", manifest, "--model", model, "--port", port)
    assert (done.code, done.out) == (USAGE, ""), "the model that was named comes first"
    first, *found = done.err.splitlines()
    assert first == "tandem: 4 things keep the endpoint from starting:"
    assert [line.partition(" ")[2].split()[0] for line in found[:2]] == ["Port", "Cannot"]
    assert found[2].startswith(f"- {model}/model.safetensors has ")
    assert found[3].startswith("- The engines take ")


def test_a_dry_run_looks_at_nothing_of_the_machine(
    tandem_command: Tandem, manifest: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    assert tandem_command("up", "-f", manifest, "--model", model, "--dry-run").code == 0


# The manifest


MISTAKES = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: small}
spec:
  modelName: small
  modelSourceConfig: {modelSourceType: s3, s3Storage: {bucketName: models, region: us-east-2}}
  pdSpec:
    routingTreshold: 9
    prefillSpec: {replicas: 0}
    decodingSpec: {args: [--max-model-len, long, "--dtype=fp99"]}
  worker:
    image: vllm
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights}
    resources: {}
"""


def test_every_mistake_is_told_as_validate_tells_it(tandem_command: Tandem, manifest: Path) -> None:
    manifest.write_text(MISTAKES)
    found = [x for x in tandem_command("validate", "-f", manifest).out.splitlines() if " error " in x]
    assert len(found) == 5
    assert (
        f"{manifest}:8:5: error IEC101 spec.pdSpec.routingTreshold: is not a field; did you mean" in found[0]
    )
    for command in ("up", "demo"):
        done = tandem_command(command, "-f", manifest)
        assert (done.code, done.out) == (USAGE, "")
        first, *told = done.err.splitlines()
        assert first == f"tandem: {manifest} is not a valid InferenceEndpointConfig:"
        assert [line.strip() for line in told] == found


def test_text_that_is_no_yaml_is_told_with_its_line(tandem_command: Tandem, manifest: Path) -> None:
    manifest.write_text("kind: InferenceEndpointConfig\nmetadata: {name: small\nspec: 1\n")
    done = tandem_command("up", "-f", manifest)
    assert (done.code, done.out) == (USAGE, "")
    assert done.err.splitlines()[1].startswith(f"  {manifest}:3:")


def test_a_manifest_that_is_a_folder_or_not_text_is_told(tandem_command: Tandem, tmp_path: Path) -> None:
    done = tandem_command("up", "-f", tmp_path)
    assert (done.code, done.err) == (USAGE, f"tandem: {tmp_path}: Is a directory\n")
    file = tmp_path / "weights.yaml"
    file.write_bytes(b"\xff\xfe")
    done = tandem_command("up", "-f", file)
    assert done.code == USAGE
    assert "is not UTF-8 text" in done.err


def test_warnings_that_matter_here_are_notes_and_others_are_counted(
    tandem_command: Tandem, manifest: Path, model: Path
) -> None:
    args = 'decodingSpec: {replicas: 2, args: ["--max-model-len=2k"]}'
    manifest.write_text(
        MANIFEST.replace(
            "pdSpec: {prefillSpec: {}, decodingSpec: {}}", f"pdSpec: {{prefillSpec: {{}}, {args}}}"
        )
    )
    done = tandem_command("up", "-f", manifest, "--model", model, "--dry-run")
    assert done.code == 0
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith(f"note: {manifest}:8:")
    assert "warning IEC706 spec.pdSpec: routingThreshold is 4096, its default" in notes[0]
    assert f"about a cluster only: `tandem validate -f {manifest}` has them" in notes[1]
    validated = tandem_command("validate", "-f", manifest)
    assert "IEC601" in validated.out
    assert not any("IEC601" in note for note in notes)


@pytest.mark.parametrize("python", ["/nowhere/python", "/dev/null"])
def test_an_interpreter_that_cannot_be_run_is_told(
    tandem_command: Tandem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    done = tandem_command("up", "--vllm-python", python)
    assert (done.code, done.out) == (ENVIRONMENT, "")
    assert done.err == f"tandem: {python} is no Python that can be run. Name one that has vLLM.\n"
