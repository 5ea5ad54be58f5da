"""`tandem status`: which endpoints there are, and how each process is."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.local.record import EndpointState

from .conftest import Tandem
from .local_endpoints import up, written

ENGINE = """\
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
ROUTER = "tandem_requests_running 4.0\ntandem_requests_waiting 1.0\n"
READY = '{"ready": true, "reason": null, "unproved": []}'
NOT_READY = '{"ready": false, "reason": "no prefill engine is ready: [x]", "unproved": []}'


@contextmanager
def serving(texts: dict[str, str]) -> Iterator[str]:
    """The URL of a server of texts, by path."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = texts.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def engine() -> Iterator[str]:
    with serving({"/metrics": ENGINE}) as url:
        yield url


@pytest.fixture
def router() -> Iterator[str]:
    with serving({"/metrics": ROUTER, "/ready": READY}) as url:
        yield url


@contextmanager
def all_ready(engine: str, router: str) -> Iterator[tuple[Path, EndpointState]]:
    with up() as (folder, state):
        for process in state.processes:
            process.url = router if process.role == "router" else engine
        state.save(folder)
        yield folder, state


def test_each_process_has_its_line(tandem_command: Tandem, engine: str, router: str) -> None:
    with all_ready(engine, router) as (folder, state):
        state.processes[1].restarts, state.processes[1].cause = 2, "decode-0 was killed by SIGKILL"
        state.save(folder)
        done = tandem_command("status")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("small at http://127.0.0.1:8000: running since ")
    assert lines[0].endswith(f", as process {state.pid}")
    assert lines[1] == f"logs in {folder}"
    rows = {words[0]: words[1:] for line in lines[2:] if (words := line.split())}
    assert list(rows["process"]) == [
        "role",
        "state",
        "pid",
        "port",
        "restarts",
        "memory",
        "requests",
        "KV",
        "use",
    ]
    mib = rows["router"][5]
    assert int(mib.replace(",", "")) > 10  # of all that this test run has started, too
    pid = str(os.getpgrp())
    assert rows["prefill-0"] == ["prefill", "ready", pid, "8100", "0", mib, "MiB", "5", "25%"]
    assert rows["decode-0"] == ["decode", "ready", pid, "8101", "2", mib, "MiB", "5", "25%"]
    assert rows["router"] == ["router", "ready", pid, "8102", "0", mib, "MiB", "5", "–"]
    assert lines[-1] == "last death: decode-0 was killed by SIGKILL"


def test_what_came_from_caches_of_kv_is_told(tandem_command: Tandem, router: str) -> None:
    caches = (
        'vllm:lmcache_l1_hit_bytes_total{engine="0"} 4.15e7\n'
        'vllm:lmcache_l2_hit_bytes_total{engine="0"} 2.5e6\n'
        'vllm:lmcache_l2_write_bytes_total{engine="0"} 1e9\n'
    )
    with serving({"/metrics": ENGINE + caches}) as engine, all_ready(engine, router):
        shown, told = tandem_command("status"), tandem_command("status", "--json")
    assert "prefill-0: KV from L1 41.5 MB, from L2 2.5 MB; written to L2 1,000.0 MB" in shown.out.splitlines()
    of_process = {each["name"]: each["cache_bytes"] for each in json.loads(told.out)[0]["processes"]}
    assert of_process["prefill-0"] == {"l1_read": 41_500_000, "l2_read": 2_500_000, "l2_written": 10**9}
    assert of_process["router"] is None


def test_what_is_not_ready_has_another_code_and_says_why(tandem_command: Tandem) -> None:
    with serving({"/metrics": ROUTER, "/ready": NOT_READY}) as url, up() as (folder, state):
        prefiller, decoder, router = state.processes
        prefiller.state, prefiller.restart_at, prefiller.pid = "restarting", time.time() + 20.2, None
        decoder.state, decoder.doing = "hung", "since 12:00:00"
        router.url = url
        state.save(folder)
        done = tandem_command("status", "small", "--port", 8000)
    assert done.code == 1
    assert re.search(
        r"prefill-0 +prefill +restarting in (19|20) s +– +8100 +0 +– +– +– *$", done.out, re.MULTILINE
    )
    assert re.search(
        r"decode-0 +decode +hung since 12:00:00 +\d+ +8101 +0 +[\d,]+ MiB +– +– *$", done.out, re.MULTILINE
    )
    assert re.search(r"router +router +not ready +\d+ +8102 +0 +[\d,]+ MiB +5 +– *$", done.out, re.MULTILINE)
    assert "router waits: no prefill engine is ready: [x]" in done.out


def test_an_endpoint_that_only_starts_is_not_ready(tandem_command: Tandem) -> None:
    with up(state="starting") as (folder, state):
        for process in state.processes:
            process.state, process.doing = "starting", "loading [/v1] [x]"
        state.save(folder)
        done = tandem_command("status")
    assert done.code == 1
    assert ": starting since " in done.out
    assert done.out.count("starting loading [/v1] [x]") == 3


def test_json_is_alone_on_stdout(tandem_command: Tandem, engine: str, router: str) -> None:
    written("ended", 8001, state="ended", cause="it was stopped")
    with all_ready(engine, router) as (folder, state):
        done = tandem_command("status", "--json")
    assert (done.code, done.err) == (0, "")
    ended, running = json.loads(done.out)
    assert (ended["name"], ended["state"], ended["cause"]) == ("ended", "ended", "it was stopped")
    assert (ended["pid"], ended["ready"], ended["processes"]) == (None, False, [])
    assert (running["url"], running["pid"], running["state"]) == (state.url, state.pid, "running")
    assert (running["ready"], running["logs"]) == (True, str(folder))
    first = running["processes"][0]
    assert first["memory_bytes"] > 10_000_000
    assert {k: v for k, v in first.items() if k not in ("memory_bytes", "url")} == {
        "name": "prefill-0",
        "role": "prefill",
        "port": 8100,
        "pid": os.getpgrp(),
        "state": "ready",
        "doing": "",
        "restarts": 0,
        "restart_at": None,
        "cause": None,
        "ready": True,
        "waits_for": None,
        "requests": 5,
        "kv_use": 0.25,
        "cache_bytes": None,
    }


def test_one_that_has_ended_says_why(tandem_command: Tandem) -> None:
    written(
        state="ended", cause="decode-0 ended with exit code 1: ValueError: no [room]\nIts log: /l", since=0.0
    )
    written("killed", 8001)
    done = tandem_command("status")
    killed, ended = done.out.splitlines()
    assert re.fullmatch(
        r"small on port 8000: ended 19(70|69)-\S+ \S+: decode-0 ended with exit code 1: "
        r"ValueError: no \[room\] Its log: /l",
        ended,
    )
    assert re.fullmatch(r"killed on port 8001: ended after .*: `tandem up` was killed, the .*", killed)
    assert (done.code, done.err.startswith("tandem: No endpoint runs on this machine. ")) == (3, True)


def test_one_that_ended_long_ago_is_shown_to_who_asks_for_it(tandem_command: Tandem) -> None:
    day = 86_400
    for name, port, state, days, log_days in (
        ("yesterday", 8000, "ended", 0.9, 5.0),
        ("earlier", 8001, "ended", 1.1, 5.0),
        ("killed", 8002, "running", 5.0, 0.9),  # its engines wrote a last line
        ("killed-earlier", 8003, "running", 5.0, 1.1),
    ):
        folder, _ = written(name, port, state=state, since=time.time() - 5 * day)
        (folder / "decode-0.log").touch()
        for file, ago in (("state.json", days), ("decode-0.log", log_days)):
            os.utime(folder / file, times=(time.time() - ago * day,) * 2)

    def shown(*words: object) -> set[str]:
        return {each["name"] for each in json.loads(tandem_command("status", "--json", *words).out)}

    assert shown() == {"yesterday", "killed"}
    assert shown("earlier") == {"earlier"}
    assert shown("--port", 8003) == {"killed-earlier"}


def test_one_that_runs_is_shown_however_long_it_has_been_silent(tandem_command: Tandem) -> None:
    with up(since=0.0) as (folder, _):
        os.utime(folder / "state.json", times=(0, 0))
        os.utime(folder / "lock", times=(0, 0))
        assert tandem_command("status").out.startswith("small at ")


def test_one_whose_up_was_killed_is_still_stopping(tandem_command: Tandem) -> None:
    with up(pid_started=1):
        done = tandem_command("status")
    assert done.code == 1
    assert "small at http://127.0.0.1:8000: stopping since " in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "No endpoint runs on this machine."),
        (("big",), "No endpoint big runs on this machine."),
        (("big", "--port", "9"), "No endpoint big on port 9 runs on this machine."),
    ],
)
def test_where_there_is_none_that_is_said(
    tandem_command: Tandem, words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = tandem_command("status", *words)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"tandem: {said} ")
    assert json.loads(tandem_command("status", "--json").out) == []
