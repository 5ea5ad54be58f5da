"""Simulated engines tell over what KV came as real ones do, so that the operator can read it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from tandem.operator.control.transport import transports
from tandem.sim import ucx_log, virtual

from .helpers import FOX, engines, pair


def logged(caplog: pytest.LogCaptureFixture, environment: Mapping[str, str]) -> str:
    """What two engines of one process log that hand over twice."""

    async def hand_over() -> None:
        async with engines(*pair(), environment=environment) as e:
            for text in (FOX * 10, f"other {FOX * 10}"):
                body = {"model": "m", "prompt": text, "max_tokens": 1}
                prefill = await e.ask(
                    0, "/v1/completions", body | {"kv_transfer_params": {"do_remote_decode": True}}
                )
                params = prefill.json["kv_transfer_params"]
                await e.ask(1, "/v1/completions", body | {"kv_transfer_params": params})

    with caplog.at_level(logging.INFO, "tandem.sim"):
        virtual.run(hand_over())
    return "\n".join(caplog.messages)


def test_where_it_is_asked_for_a_decoder_tells_once_of_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    log = logged(caplog, {"UCX_PROTO_INFO": "*ucp_[gp][eu]t[*]*"})
    assert transports(log, "read") == ("shared memory (cma/memory)",)
    assert transports(log, "write") == ()
    assert log.count("cma/memory") == 1


@pytest.mark.parametrize("value", [None, "n"])
def test_else_nothing_is_told(caplog: pytest.LogCaptureFixture, value: str | None) -> None:
    assert "cma/memory" not in logged(caplog, {} if value is None else {"UCX_PROTO_INFO": value})


def test_from_another_process_it_comes_over_the_network(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tandem.sim"):
        ucx_log.tell("a3ded923-4ba1-4eb1-9343-30b28b8e0a11", local=False)
    assert transports("\n".join(caplog.messages), "read") == ("TCP (tcp/eth0)",)
