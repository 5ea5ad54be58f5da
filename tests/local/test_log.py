"""What is read in a process's log, the line above all that a person is shown: what went wrong, not where it
ended; and how logs are kept small."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from tandem.local.log import LAST_STAGE, cause_of_death, keep_small, mark_restart, remove_old, stage

CORE_FAILS = """\
(APIServer pid=11) INFO 11-29 18:12:01 [api_server.py:520] vLLM API server version 0.32.0
(EngineCore pid=17) INFO 11-29 18:12:09 [core.py:94] Initializing a V1 LLM engine with config: model='m'
(EngineCore pid=17) ERROR 11-29 18:12:13 [core.py:1510] EngineCore failed to start.
(EngineCore pid=17) ERROR 11-29 18:12:13 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=17) ERROR 11-29 18:12:13 [core.py:1510]   File "vllm/v1/engine/core.py", line 1482, in run
(EngineCore pid=17) ERROR 11-29 18:12:13 [core.py:1510]     raise ValueError(
(EngineCore pid=17) ERROR 11-29 18:12:13 [core.py:1510] ValueError: Available memory on node 0 (2.1/14 GiB) \
is less than requested memory for kv (4.0 GiB).
(EngineCore pid=17) Process EngineCore:
"""
SERVER_FOLLOWS = """\
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11)   File "vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=11)     raise RuntimeError(
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. \
Failed core proc(s): {}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear \
to be 1 leaked shared_memory objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""
NO_MEMORY = (
    "ValueError: Available memory on node 0 (2.1/14 GiB) is less than requested memory for kv (4.0 GiB)."
)
BAD_LENGTH = """\
Traceback (most recent call last):
  File "vllm/engine/arg_utils.py", line 1955, in create_model_config
    return ModelConfig(
           ^^^^^^^^^^^^
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (9999999) is greater than the derived max_model_len (8192).
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
BAD_FLAG = """\
                     [--enable-log-requests | --no-enable-log-requests]
                     [model_tag]
api_server.py: error: unrecognized arguments: --foo
"""
DIED_AT_WORK = """\
(EngineCore pid=17) ERROR 11-29 18:31:39 [core.py:1502] EngineCore encountered a fatal error.
(EngineCore pid=17) ERROR 11-29 18:31:39 [core.py:1502] Traceback (most recent call last):
(EngineCore pid=17) ERROR 11-29 18:31:39 [core.py:1502] torch.OutOfMemoryError: Tried to allocate 2.00 GiB.
(APIServer pid=11) ERROR 11-29 18:31:39 [async_llm.py:906] AsyncLLM output_handler failed.
(APIServer pid=11) ERROR 11-29 18:31:39 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: \
EngineCore encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=11) INFO 11-29 18:31:39 [launcher.py:279] [shutdown] API server: engine client stopped
INFO:     Application shutdown complete.
"""
PORT_TAKEN = """\
2026-01-05 10:00:00,123 [INFO] mode: 1 prefill, 1 decode
Traceback (most recent call last):
  File "app.py", line 3, in run
OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("Traceback (most recent call last):\n  File \"x.py\", line 1\nKeyError: 'a'\n", "KeyError: 'a'"),
        (CORE_FAILS, NO_MEMORY),
        (CORE_FAILS + SERVER_FOLLOWS, NO_MEMORY),
        (
            BAD_LENGTH,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, "
            "User-specified max_model_len (9999999) is greater than the derived max_model_len (8192).",
        ),
        (BAD_FLAG, "api_server.py: error: unrecognized arguments: --foo"),
        (DIED_AT_WORK, "torch.OutOfMemoryError: Tried to allocate 2.00 GiB."),
        (
            PORT_TAKEN,
            "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): "
            "address already in use",
        ),
        ("loading\nKilled\n", "Killed"),
        ("WARNING 11-29 [x.py:1] OSError: [Errno 24] may come\nINFO 11-29 [x.py:1] ERROR: 0\nbye\n", "bye"),
        ("(APIServer pid=1) OSError: x. See root cause above.\n", "OSError: x. See root cause above."),
        (
            "(APIServer pid=1) ERROR 11-29 18:32:10 [executor.py:315] Worker proc 0 died unexpectedly.\n",
            "Worker proc 0 died unexpectedly.",
        ),
        ("\n \n", "it wrote nothing"),
        ("INFO:     Application startup complete.\n", "it wrote nothing"),
        ("ValueError: x\nINFO:     Application startup complete.\nINFO: GET / 200\n", "INFO: GET / 200"),
        ("ValueError: " + "x" * 1000, ("ValueError: " + "x" * 1000)[:500]),
    ],
)  # fmt: skip
def test_the_cause_is_found(tmp_path: Path, log: str, cause: str) -> None:
    file = tmp_path / "decode-0.log"
    file.write_text(log)
    assert cause_of_death(file) == cause


def test_a_log_that_is_not_there_is_an_empty_one(tmp_path: Path) -> None:
    assert cause_of_death(tmp_path / "none.log") == "it wrote nothing"


def test_a_log_that_has_become_something_else_is_no_cause_and_holds_nobody_up(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    os.mkfifo(file)
    assert cause_of_death(file) == f"error: {file} cannot be read: it is a FIFO and no file"
    assert stage(file) == "importing vLLM"
    file.unlink()
    file.symlink_to("/dev/zero")
    assert cause_of_death(file) == f"error: {file} cannot be read: it is a device and no file"


def test_a_line_without_end_hides_no_cause_below_it_and_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    file.write_text("ValueError: ")
    os.truncate(file, 3 << 30)  # with a hole in it
    tracemalloc.start()
    try:
        assert len(cause_of_death(file)) <= 500
        with file.open("a") as log:
            log.write("\nOSError: the cause\n")
        assert cause_of_death(file) == "OSError: the cause"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_only_the_end_of_a_long_log_is_read_and_broken_text_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    file.write_bytes(b"ValueError: an old one\n" + b"\xff\n" * 100_000 + b"OSError: the last\n")
    assert cause_of_death(file) == "OSError: the last"


def test_what_was_written_before_a_restart_is_no_cause_and_no_progress(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    before = "INFO:     Application startup complete.\nValueError: an old one\n"
    file.write_bytes(before.encode() + mark_restart("decode-0", 1))
    assert cause_of_death(file) == "it wrote nothing"
    assert stage(file) == "importing vLLM"
    with file.open("a") as log:
        log.write("INFO 11-29 [x.py:1] Starting to load model /m\n")
    assert cause_of_death(file).endswith("Starting to load model /m")
    assert stage(file) == "loading the weights"
    with file.open("a") as log:
        log.write(before)
    assert cause_of_death(file) == "ValueError: an old one"
    assert stage(file) == LAST_STAGE


def test_a_log_that_grows_too_large_begins_anew_and_one_old_one_is_kept(tmp_path: Path) -> None:
    file, old = tmp_path / "decode-0.log", tmp_path / "decode-0.log.1"
    with file.open("ab") as process:  # which has it open all the time

        def write(text: bytes) -> None:
            process.write(text)
            process.flush()

        write(b"first" * 10)
        keep_small(file, 50)
        assert not old.exists()
        write(b"!")
        keep_small(file, 50)
        assert (file.read_bytes(), old.read_bytes()) == (b"", b"first" * 10 + b"!")
        write(b"second" * 10)
        keep_small(file, 50)
        write(b"third")
        assert (file.read_bytes(), old.read_bytes()) == (b"third", b"second" * 10)


def test_a_log_that_cannot_be_kept_small_is_let_be(tmp_path: Path) -> None:
    keep_small(tmp_path / "none.log", 0)
    (tmp_path / "a.log").write_text("text")
    (tmp_path / "a.log.1").mkdir()
    keep_small(tmp_path / "a.log", 0)
    assert (tmp_path / "a.log").read_text() == "text"


def test_the_logs_of_earlier_runs_go_and_nothing_else(tmp_path: Path) -> None:
    for name in ("decode-7.log", "decode-7.log.1", "state.json", "lock"):
        (tmp_path / name).touch()
    remove_old(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "state.json"]
