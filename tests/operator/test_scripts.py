"""The programs that run in model pods."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.operator.scripts import copy_weights, drain, text

IDLE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("page", "busy"),
    [
        (IDLE, False),
        ("", False),
        (IDLE.replace('running{engine="0"} 0.0', 'running{engine="0"} 2.0'), True),
        ("vllm:num_requests_waiting 1.0", True),
        ("vllm:num_requests_waiting_by_reason 1.0", False),
        ("# HELP vllm:num_requests_running 3", False),
    ],
)
def test_metrics_tell_whether_an_engine_is_busy(page: str, busy: bool) -> None:
    assert drain.busy(page) is busy


def test_it_waits_to_be_forgotten_then_until_idle_then_for_those_who_fetch() -> None:
    time = Time()
    looks: list[float] = []

    def is_busy() -> bool:
        looks.append(time.now)
        return time.now < 40

    assert drain.drain(is_busy, 15, 1000, 30, time.sleep, lambda: time.now)
    assert looks[0] == 15
    assert 70 <= time.now <= 75


def test_an_engine_that_never_rests_is_given_up() -> None:
    time = Time()
    assert not drain.drain(lambda: True, 1, 100, 30, time.sleep, lambda: time.now)
    assert time.now < 110


def test_one_quiet_look_between_two_requests_is_not_the_end() -> None:
    time = Time()
    busy = iter([True, False, True, False, False])
    assert drain.drain(lambda: next(busy), 0, 100, 0, time.sleep, lambda: time.now)
    assert next(busy, None) is None


@pytest.fixture
def engine() -> Iterator[str]:
    """Metrics of an idle engine, by HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 500)
            self.end_headers()
            self.wfile.write(IDLE.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_engine_is_asked_by_http(engine: str) -> None:
    assert drain.look(f"{engine}/metrics", 10) is False
    assert drain.look(f"{engine}/broken", 10) is True, "one that is in trouble may still be busy"


def test_an_engine_that_has_ended_is_not_busy() -> None:
    assert drain.look("http://127.0.0.1:1/metrics", 10) is False


def test_the_program_ends_well_before_an_idle_engine(engine: str) -> None:
    words = [sys.executable, "-", "--metrics", f"{engine}/metrics", "--limit", "60"]
    done = subprocess.run(words, input=text("drain.py"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep/er").mkdir(parents=True)
    for i in range(40):
        (folder / f"model-{i}.safetensors").write_bytes(bytes([i]) * 1000)
    (folder / "deep/er/config.json").write_text("{}")
    return folder


def test_weights_are_copied_whole(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert copy_weights.copy(source, target) == (41, 40_002)
    for path in source.rglob("*"):
        if path.is_file():
            assert (target / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert not list(target.rglob("*.part"))


def test_a_copy_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    copy_weights.copy(source, target)
    (target / "model-3.safetensors").write_bytes(b"half")
    assert copy_weights.copy(source, target) == (41, 1000)


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_weights_is_told(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = [sys.executable, "-", str(tmp_path / folder), str(tmp_path / "target")]
    done = subprocess.run(words, input=text("copy_weights.py"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "modelLocation" in done.stderr


HUB = """
def snapshot_download(model, **given):
    if model == "a/gone":
        raise RuntimeError("401 Client Error")
    print(model, given)
"""


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("a/b", 0, "a/b {'revision': 'abc', 'local_dir': '/m', 'ignore_patterns': ['*.pth', 'x/*']}"),
        ("a/gone", 1, "HuggingFaceDownloadFailed: a/gone: 401 Client Error"),
    ],
)
def test_a_model_is_downloaded_by_the_hubs_own_library(
    model: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "huggingface_hub.py").write_text(HUB)
    words = [sys.executable, "-", model, "/m", "--revision", "abc", "--ignore", "*.pth,x/*"]
    done = subprocess.run(
        words, input=text("download_model.py"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
