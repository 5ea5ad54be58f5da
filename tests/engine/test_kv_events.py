"""vLLM's `--kv-events-config`: when an engine publishes, where, and what of its own settings stays."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api import Endpoint, Role
from tandem.config import EngineSpec, Subscription, engine_spec
from tandem.engine import (
    EngineError,
    EnginePlan,
    EnginePorts,
    engine_count,
    flag_value,
    kv_events_config,
    plan,
    pod_kv_events,
    wants_kv_events,
)
from tandem.engine.kv_events import MOST_RANKS

from .endpoints import NVME, endpoint, manifest
from .test_launch import CPU, GPU, flags

IPC = Subscription("ipc:///run/kv/8101.events", "ipc:///run/kv/8101.replay")
NIXL_SIDE_CHANNEL = 5600


def planned(endpoint: Endpoint, model: Path, machine: Any = CPU) -> EnginePlan:
    ports = [
        EnginePorts(
            8101 + i, 5601 + i, Subscription(f"ipc:///run/kv/{i}.events", f"ipc:///run/kv/{i}.replay")
        )
        for i in range(engine_count(endpoint))
    ]
    return plan(endpoint, machine, model, ports)


def events_of(made: EnginePlan) -> list[dict[str, Any]]:
    return [json.loads(flag_value(flags(e), "--kv-events-config") or "") for e in made.engines]


def vllm_kv_events() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "vllm.distributed.kv_events", reason="needs vLLM's CPU build: run `make setup`"
        )


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (None, False),
        ({"enabled": True}, False),
        ({"enabled": True, "routingStrategy": "roundrobin"}, False),
        ({"enabled": True, "routingStrategy": "kvaware"}, True),
    ],
)
def test_events_are_wanted_by_the_strategy_kvaware(spec: dict[str, Any] | None, wanted: bool) -> None:
    document = yaml.safe_load(NVME)
    if spec is not None:
        document["spec"]["intelligentRoutingSpec"] = spec
    assert wants_kv_events(manifest(yaml.safe_dump(document))) is wanted


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_vllm_takes_what_engines_of_both_roles_are_told(
    vllm_parse: Callable[[Sequence[str]], argparse.Namespace], model: Path, machine: Any
) -> None:
    made = planned(endpoint(prefillers=2, decoders=2), model, machine)
    assert {e.role for e in made.engines} == set(Role)
    for i, engine in enumerate(made.engines):
        parsed = vllm_parse(flags(engine)).kv_events_config
        assert (parsed.enable_kv_cache_events, parsed.publisher, parsed.topic) == (True, "zmq", "")
        assert parsed.endpoint == f"ipc:///run/kv/{i}.events"
        assert parsed.replay_endpoint == f"ipc:///run/kv/{i}.replay"
        assert parsed.hwm <= parsed.buffer_steps, "what waits for a slow router can also be replayed"
        assert engine.kv_events == Subscription(parsed.endpoint, parsed.replay_endpoint)


def test_an_engine_without_an_endpoint_for_events_keeps_its_own_flags(model: Path) -> None:
    own = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:7000"})
    ports = [EnginePorts(8101 + i, 5601 + i) for i in range(2)]
    made = plan(endpoint(["--kv-events-config", own]), CPU, model, ports)
    assert [flag_value(flags(e), "--kv-events-config") for e in made.engines] == [own, own]
    assert not any("kv-events" in note for note in made.notes)
    assert {e.kv_events for e in made.engines} == {None}


OWN = {
    "enable_kv_cache_events": False,
    "publisher": "null",
    "endpoint": "tcp://*:7000",
    "topic": "kv",
    "hwm": 7,
}


@pytest.mark.parametrize(
    "own",
    [
        ["--kv-events-config", json.dumps(OWN)],
        ["--kv_events_config=" + json.dumps(OWN)],
        ["--kv-events-config.topic", "kv", "--kv-events-config.hwm=7"],
    ],
)
def test_an_engines_own_settings_stay_but_for_whether_and_where(model: Path, own: list[str]) -> None:
    """Two engines would bind the same endpoint, and `tcp://*` would show prompts to the network."""
    made = planned(endpoint(own), model)
    assert [(e["topic"], e["hwm"]) for e in events_of(made)] == [("kv", 7), ("kv", 7)]
    assert [e["endpoint"] for e in events_of(made)] == ["ipc:///run/kv/0.events", "ipc:///run/kv/1.events"]
    assert all(e["enable_kv_cache_events"] and e["publisher"] == "zmq" for e in events_of(made))
    assert not any("7000" in argument for e in made.engines for argument in e.argv)
    assert any(
        "of spec.worker.args: replaced by one with the endpoints that Tandem chose" in note
        for note in made.notes
    )


@pytest.mark.parametrize("value", ["{", "[]", "tcp://*:7000"])
def test_own_settings_that_cannot_be_read_are_an_error(model: Path, value: str) -> None:
    with pytest.raises(EngineError, match=r"--kv-events-config .* is not a JSON object"):
        planned(endpoint(["--kv-events-config", value]), model)


def test_engines_without_a_prefix_cache_are_noted(model: Path) -> None:
    off = endpoint(decode_args=["--no-enable-prefix-caching"])
    note = "engines keep no prefixes, so the strategy kvaware finds none there and goes by their load"
    assert f"--no-enable-prefix-caching: decode {note}" in planned(off, model).notes
    on_again = endpoint(["--no-enable-prefix-caching"], prefill_args=["--enable-prefix-caching"])
    assert [n.split()[1] for n in planned(on_again, model).notes if note in n] == ["decode"]
    assert not any(note in n for n in planned(endpoint(), model).notes), "it is on by default"


@pytest.mark.parametrize("ranks", [1, 2, MOST_RANKS])
def test_no_two_ranks_of_a_pod_take_the_same_port(ranks: int) -> None:
    """By vLLM's own arithmetic, NIXL's side channels included; the router is told the same."""
    module = vllm_kv_events()
    where = pod_kv_events(ranks)
    config = module.KVEventsConfig(**json.loads(kv_events_config(where)))
    shifted, bound = module.ZmqEventPublisher.offset_endpoint_port, module.ZmqEventPublisher._is_bind_endpoint
    ports = [NIXL_SIDE_CHANNEL + rank for rank in range(ranks)]
    for rank in range(ranks):
        events, replay = shifted(config.endpoint, rank), shifted(config.replay_endpoint, rank)
        assert bound(events)
        assert where.of(rank) == (events, replay)
        ports += [int(endpoint.rpartition(":")[2]) for endpoint in (events, replay)]
    assert len(set(ports)) == 3 * ranks


def test_more_ranks_than_have_ports_are_refused() -> None:
    with pytest.raises(EngineError, match=f"--data-parallel-size {MOST_RANKS + 1}: .* at most {MOST_RANKS}"):
        pod_kv_events(MOST_RANKS + 1)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (Subscription("tcp://127.0.0.1:5557"), "it connects"),
        (Subscription("tcp://*:5557", "tcp://10.0.0.1:6557"), "it connects"),
        (Subscription("tcp://*:5557", "tcp://*:5557"), "meet"),
        (Subscription("tcp://*:5557", "tcp://*:5560", 4), "meet with 4 ranks"),
        (Subscription("ipc:///run/kv", "ipc:///run/kv"), "meet"),
    ],
)
def test_endpoints_that_cannot_work_are_refused(where: Subscription, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kv_events_config(where)


@pytest.mark.parametrize(
    "where",
    [None, IPC, replace(IPC, replay=None), Subscription("tcp://*:5557", "tcp://*:6557", 8)],
)
def test_the_router_reads_back_what_it_is_told_of_an_engine(where: Subscription | None) -> None:
    spec = EngineSpec("http://127.0.0.1:8101", (("zone", "a"),), where)
    assert engine_spec(spec.text) == spec
    if where is not None:
        assert json.loads(kv_events_config(where))["replay_endpoint"] == where.replay
