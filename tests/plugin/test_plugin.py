"""The vLLM plugin: what it changes of vLLM and NIXL, and what it leaves alone."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import subprocess
import sys
import types
import warnings
from importlib.metadata import entry_points
from typing import Any

import pytest

import tandem_vllm


@pytest.fixture(scope="session")
def cpu_nixl() -> Any:
    """The connector's module, with the real vLLM and NIXL below it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="needs vLLM's CPU build: run `make setup`")
        pytest.importorskip("nixl", reason="needs NIXL: run `make setup`")
        return importlib.import_module("tandem_vllm.cpu_nixl")


@pytest.fixture(scope="session")
def agents(cpu_nixl: Any) -> Any:
    """What the connectors have in common: `nixl_agents`."""
    return importlib.import_module("tandem_vllm.nixl_agents")


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid(monkeypatch, "vllm")


def _forbid(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make imports of a package fail, as where it is not installed."""
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", importing)


class TestRegister:
    def test_makes_the_connector_known_by_name_and_can_be_called_again(self, cpu_nixl: Any) -> None:
        factory = importlib.import_module(
            "vllm.distributed.kv_transfer.kv_connector.factory"
        ).KVConnectorFactory
        tandem_vllm.register()
        tandem_vllm.register()
        assert "CpuLMCacheConnector" in factory._registry
        assert factory.get_connector_class_by_name("CpuNixlConnector") is cpu_nixl.CpuNixlConnector

    def test_says_why_and_goes_on_where_vllm_has_no_such_factory(
        self, without_vllm: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="vllm.tandem"):
            tandem_vllm.register()
        assert "CpuNixlConnector, CpuLMCacheConnector are not available with this vLLM" in caplog.text
        assert "No module named" in caplog.text

    def test_is_cheap_to_import(self) -> None:
        """vLLM imports plugins in every process; this one imports nothing heavy, and nothing of Tandem's."""
        code = "import sys, tandem_vllm; print(*sorted({m.split('.')[0] for m in sys.modules}))"
        loaded = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        assert not {"vllm", "torch", "nixl", "tandem"} & set(loaded)

    def test_is_found_by_vllm(self) -> None:
        [entry] = entry_points(group="vllm.general_plugins", name="tandem")
        assert entry.load() is tandem_vllm.register


class TestAskedForWhereItCannotWork:
    def test_without_the_pull_connector_the_error_says_what_is_missing(
        self, cpu_nixl: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.nixl", types.ModuleType("nixl")
        )
        monkeypatch.delitem(sys.modules, "tandem_vllm.cpu_nixl")
        with pytest.raises(ImportError, match="needs a vLLM that has NixlPullConnector"):
            importlib.import_module("tandem_vllm.cpu_nixl")

    def test_without_nixl_the_error_says_what_to_install(
        self, agents: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "nixl._api", None)
        with pytest.raises(ImportError, match="Install the packages nixl and nixl-cu12"):
            agents.nixl_api()


class TestProgressDelay:
    @pytest.mark.parametrize(
        ("text", "delay_us"), [(None, 1000), ("0", 0), ("250", 250), ("1000000", 1_000_000)]
    )
    def test_is_read_from_the_environment(self, agents: Any, text: str | None, delay_us: int) -> None:
        environ = {} if text is None else {"TANDEM_NIXL_PROGRESS_DELAY_US": text}
        assert agents.progress_delay_us(environ) == delay_us

    @pytest.mark.parametrize("text", ["", "-1", "1.5", "1ms", "1000001", "²"])
    def test_that_makes_no_sense_is_refused(self, agents: Any, text: str) -> None:
        with pytest.raises(ValueError, match="whole number of microseconds from 0 to 1000000"):
            agents.progress_delay_us({"TANDEM_NIXL_PROGRESS_DELAY_US": text})

    def test_reaches_the_native_configuration_of_agents_made_meanwhile(
        self, agents: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        api = agents.nixl_api()
        configurations = []

        def agent(name: str, configuration: Any) -> Any:
            configurations.append(configuration)
            raise _Made

        monkeypatch.setattr(api.nixlBind, "nixlAgent", agent)
        with agents.paced_progress(api, 1234), pytest.raises(_Made):
            api.nixl_agent("inside", api.nixl_agent_config())
        with pytest.raises(_Made):
            api.nixl_agent("after", api.nixl_agent_config())
        inside, after = configurations
        assert isinstance(inside, type(after))
        assert (inside.pthrDelay, after.pthrDelay) == (1234, 0)
        assert inside.useProgThread

    def test_that_this_nixl_does_not_know_is_a_warning(
        self, agents: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warned: list[str] = []
        monkeypatch.setattr(agents.logger, "warning", warned.append)
        with agents.paced_progress(types.ModuleType("other_nixl"), 1000):
            pass
        assert warned == ["This NIXL has no delay for its progress thread: it may use a whole core"]


class TestAffinity:
    @pytest.fixture
    def affinity(self, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
        current = [{0, 1, 2, 3}]
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(current[-1]))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: current.append(set(cpus)))
        return current

    def test_is_as_before_after_the_stock_connector_pinned_the_thread(
        self, cpu_nixl: Any, affinity: list[set[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stock(self: Any, *args: Any) -> None:
            os.sched_setaffinity(0, [3])

        monkeypatch.setattr(cpu_nixl.NixlPullConnector, "__init__", stock)
        cpu_nixl.CpuNixlConnector(None, None, None)
        assert affinity == [{0, 1, 2, 3}, {3}, {0, 1, 2, 3}]

    def test_is_restored_when_the_stock_connector_fails_too(
        self, cpu_nixl: Any, agents: Any, affinity: list[set[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stock(self: Any, *args: Any) -> None:
            os.sched_setaffinity(0, [3])
            raise RuntimeError("no memory")

        monkeypatch.setattr(cpu_nixl.NixlPullConnector, "__init__", stock)
        native = agents.nixl_api().nixlBind.nixlAgentConfig
        with pytest.raises(RuntimeError, match="no memory"):
            cpu_nixl.CpuNixlConnector(None, None, None)
        assert affinity[-1] == {0, 1, 2, 3}
        assert agents.nixl_api().nixlBind.nixlAgentConfig is native


def test_vllm_accepts_the_connector_as_it_would_the_stock_one(cpu_nixl: Any) -> None:
    """Hybrid KV cache managers and the three-argument constructor are asked for by vLLM's factory."""
    supports_hma = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1").supports_hma
    supports_kw = importlib.import_module("vllm.utils.func_utils").supports_kw
    assert supports_hma(cpu_nixl.CpuNixlConnector)
    assert supports_kw(cpu_nixl.CpuNixlConnector, "kv_cache_config")


class _Made(Exception):
    """Ends the making of an agent where its configuration is known."""
