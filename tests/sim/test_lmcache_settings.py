"""LMCache's configuration, and its notifications on real sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tandem.sim import EngineSpec, UsageError, parse
from tandem.sim.args import KvTransfer
from tandem.sim.lmcache import Settings, read
from tandem.sim.lmcache.notify import encoded

from .helpers import engines, flags, in_virtual_time
from .lmcache_pair import BEFORE, PAGE, SEED, Router, command, receiver, sender

# Real sockets


async def test_over_real_sockets_between_processes(unused_tcp_port_factory: Any) -> None:
    d = receiver(init_ports=(unused_tcp_port_factory(),), alloc_ports=(unused_tcp_port_factory(),))
    with zmq.asyncio.Socket(zmq.Context.instance(), zmq.PULL) as pull:
        p = sender(proxy=("127.0.0.1", pull.bind_to_random_port("tcp://127.0.0.1")))

        def alone(settings: Settings) -> EngineSpec:
            # Fleets share nothing here, as processes do not.
            return EngineSpec(parse(command(settings)), side_channel=("127.0.0.1", 0))

        fast = {"environment": SEED, "time_scale": 10}
        async with engines(alone(p), **fast) as prefiller, engines(alone(d), **fast) as decoder:
            asked = Router(prefiller, [])
            answering = Router(decoder, [])
            for i in range(3):
                assert (await asked.prefill(f"r{i}", to=d)).status == 200
                async with asyncio.timeout(10):
                    assert await pull.recv() == encoded(f"r{i}")
                decoded = await answering.decode(f"r{i}", number=0)
                assert decoded.text == await answering.local_text(number=0)
            state = (await decoder.ask(0, "/sim/state")).json
            assert state["receive_buffer"] == {
                "chunks": 100,
                "used": 0,
                "free": 100,
                "allocations_waiting": 0,
            }
            assert state["wrong_kv"] == 0


async def test_notifications_wait_for_a_router_that_comes_later(unused_tcp_port: int) -> None:
    async with engines(
        command(sender(proxy=("127.0.0.1", unused_tcp_port))), command(receiver()), environment=SEED
    ) as e:
        await Router(e, []).prefill(BEFORE)
        with zmq.asyncio.Socket(zmq.Context.instance(), zmq.PULL) as pull:
            pull.bind(f"tcp://127.0.0.1:{unused_tcp_port}")
            async with asyncio.timeout(10):
                assert await pull.recv() == encoded(BEFORE)


def test_the_notification_is_lmcaches_own_byte_for_byte() -> None:
    ids = ["r1", "", "chatcmpl-0123456789abcdef-ü", "x" * 300]
    program = (
        "import sys, msgspec\n"
        "from lmcache.v1.storage_backend.pd_backend import PDMsg, ProxyNotif\n"
        "theirs = [msgspec.msgpack.encode(ProxyNotif(req_id=i)) for i in sys.argv[2:]]\n"
        "mine = [bytes.fromhex(h) for h in sys.argv[1].split(',')]\n"
        "assert mine == theirs, (mine, theirs)\n"
        "assert [msgspec.msgpack.decode(m, type=PDMsg).req_id for m in mine] == sys.argv[2:]\n"
        "print('equal')\n"
    )
    # In a process of its own: LMCache brings torch and its own logging with it.
    mine = ",".join(encoded(i).hex() for i in ids)
    done = subprocess.run(
        [sys.executable, "-c", program, mine, *ids], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "equal"


# Configuration


def transfer(**extra: Any) -> KvTransfer:
    return KvTransfer(connector="LMCacheConnectorV1", role="kv_consumer", extra=extra)


def test_a_file_the_environment_and_vllms_extra_configuration_override_each_other(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "chunk_size: 128\nenable_pd: True\npd_role: receiver\npd_buffer_size: 1000000\n"
        "pd_buffer_device: cpu\npd_peer_host: 10.0.0.7\npd_peer_init_port: 7300\n"
        "pd_peer_alloc_port: [7400]\npd_backend_mode: sync\nlocal_cpu: false\n"
    )
    environment = {
        "LMCACHE_CONFIG_FILE": str(file),
        "LMCACHE_CHUNK_SIZE": "'512'",
        "LMCACHE_PD_PEER_INIT_PORT": "7310,7311",
        "LMCACHE_SAVE_DECODE_CACHE": "False",
        "PYTHONHASHSEED": "0",
    }
    settings = read(
        transfer(**{"lmcache.chunk_size": 64, "discard_partial_chunks": False}), environment, ranks=1
    )
    assert settings == Settings(
        role="receiver",
        buffer_bytes=1_000_000,
        chunk_size=64,
        peer_host="10.0.0.7",
        init_ports=(7310, 7311),
        alloc_ports=(7400,),
        hash_seed="0",
    )


def test_engines_of_one_process_count_their_ports_up() -> None:
    extra = receiver(init_ports=(7300, 7301), alloc_ports=(7400, 7401)).transfer_config()[
        "kv_connector_extra_config"
    ]
    third = read(transfer(**extra), {}, ranks=2, offset=2)
    assert third is not None
    assert third.init_ports == (7304, 7305)
    assert third.alloc_ports == (7404, 7405)


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_settings_survive_the_command_line(role: str) -> None:
    settings = sender(7) if role == "sender" else receiver(7, skip_last_tokens=1, save_partial_chunks=False)
    config = parse(command(settings)).kv_transfer
    assert config is not None
    assert read(config, {}, ranks=1) == settings


def test_a_sender_need_not_notify() -> None:
    config = parse(command(sender(proxy=None))).kv_transfer
    assert config is not None
    assert read(config, {}, ranks=1) == sender(proxy=None)


def test_without_pd_there_is_no_hand_off() -> None:
    assert read(transfer(), {"LMCACHE_CHUNK_SIZE": "64"}, ranks=1) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pd_role": None}, "enable_pd needs pd_role"),
        ({"pd_buffer_size": None}, "pd_buffer_size"),
        ({"pd_buffer_device": None}, "pd_buffer_device"),
        ({"pd_peer_host": None, "pd_peer_init_port": None}, "pd_peer_host, pd_peer_init_port"),
        ({"pd_role": "sender"}, "pd_proxy_host, pd_proxy_port"),
        ({"pd_role": "both"}, "there are sender and receiver"),
        ({"pd_buffer_size": "much"}, "pd_buffer_size: 'much' is not valid"),
        ({"pd_peer_init_port": []}, "0 ports for 1 tensor-parallel ranks"),
    ],
    ids=str,
)
def test_what_lmcache_would_not_start_with_is_told(change: dict[str, Any], said: str) -> None:
    extra = receiver().transfer_config()["kv_connector_extra_config"]
    extra |= {f"lmcache.{key}": value for key, value in change.items()}
    with pytest.raises(UsageError, match=said):
        read(transfer(**extra), {}, ranks=1)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for name, text in (("list.yaml", "- 1\n"), ("broken.yaml", "a: [\n")):
        (tmp_path / name).write_text(text)
    for name in ("missing.yaml", "list.yaml", "broken.yaml"):
        with pytest.raises(UsageError, match=f"LMCACHE_CONFIG_FILE: .*{name}"):
            read(transfer(), {"LMCACHE_CONFIG_FILE": str(tmp_path / name)}, ranks=1)


@in_virtual_time
async def test_a_buffer_smaller_than_a_chunk_is_told() -> None:
    small = replace(receiver(), buffer_bytes=PAGE - 1)
    with pytest.raises(UsageError, match="smaller than one chunk of 1474560 bytes"):
        async with engines(command(small), environment=SEED):
            pass


@in_virtual_time
async def test_a_role_that_kv_role_forbids_does_nothing() -> None:
    config = {**sender().transfer_config(), "kv_role": "kv_consumer"}
    lines = flags("--kv-transfer-config", json.dumps(config))
    async with engines(lines, command(receiver()), environment=SEED) as e:
        r = Router(e, [])
        await r.prefill("r1")
        await asyncio.sleep(1)
        assert r.buffer()["used"] == 0
