"""Real engines that a test may kill, freeze and start again, each in a process group of its own.

`planned`: two prefillers and two decoders with a tiny model, started as `tandem up` would start them, but
with a short lease, and with prefills that take many steps.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem.api import Role, parse_endpoint
from tandem.engine import EngineLaunch, detect, plan
from tandem.local import launch
from tandem.local.plan import LOOPBACK
from tandem.local.ports import engine_ports

from .between import Between, until
from .conftest import wait_for
from .processes import of_group

LEASE_SECONDS = 6
"""The shortest that vLLM can renew."""
CONTEXT = 8192
COUNT = 2
"""Engines of each role."""
MANIFEST = f"""
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {{name: killable}}
spec:
  modelName: tiny
  modelSourceConfig: {{modelSourceType: kubernetesVolume}}
  kubernetes: {{volumes: [{{name: weights, hostPath: {{path: /replaced}}}}]}}
  pdSpec:
    prefillSpec: {{replicas: {COUNT}, args: [--max-num-batched-tokens, "64", --max-num-seqs, "16"]}}
    decodingSpec: {{replicas: {COUNT}}}
  worker:
    image: vllm
    args: [--model, /opt/ml/model, --served-model-name, smollm2, --load-format, dummy,
           --max-model-len, "{CONTEXT}", --kv-cache-memory-bytes, "67108864"]
    modelInvocationPort: {{containerPort: 8000}}
    modelVolumeMount: {{name: weights}}
    resources: {{}}
"""


@dataclass
class Engine:
    """One engine, in a process group of its own."""

    how: EngineLaunch
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return self.how.url

    def start(self) -> None:
        cpus = ",".join(map(str, self.how.cpus)) or "-"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", launch.__file__, cpus, *self.how.argv],
                env=self.how.environment(os.environ),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        wait_for(self.process, f"{self.url}/health", self.log)

    def signal(self, number: int) -> None:
        """To all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It hangs in the block: its port takes connections, and nothing is answered."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it; nothing of it may be left."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            await until(lambda: self.process.poll() is not None and not of_group(self.process.pid))
        except TimeoutError:
            self.signal(signal.SIGKILL)
            self.process.wait()
            raise


@dataclass
class Engines:
    prefill: list[Engine]
    decode: list[Engine]

    @property
    def all(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    @classmethod
    def of(cls, launches: Sequence[EngineLaunch], folder: Path) -> Engines:
        """None of them started; their logs go to a folder."""
        engines = [Engine(how, folder / f"{how.name}.log") for how in launches]
        return cls(
            prefill=[e for e in engines if e.how.role is Role.PREFILL],
            decode=[e for e in engines if e.how.role is Role.DECODE],
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """They are up in the block; after it no process may be left."""
        async with AsyncExitStack() as stack:
            for engine in self.all:
                engine.start()
                stack.push_async_callback(engine.stop)
            for engine in self.all:
                engine.wait()
            yield

    def at(self, url: str) -> Engine:
        return next(engine for engine in self.all if engine.url == url)

    async def kill(self, stand: Between) -> None:
        """Kill an engine; its port is closed then."""
        self.at(stand.engine).signal(signal.SIGKILL)
        await stand.refuse()

    async def revive(self, *stands: Between) -> None:
        """Start killed engines again, at their ports."""
        dead = [self.at(stand.engine) for stand in stands]
        for engine in dead:
            await engine.stop()
            engine.start()
        await asyncio.gather(*(asyncio.to_thread(engine.wait) for engine in dead))
        for stand in stands:
            await stand.accept()


def planned(python: str, model: Path, folder: Path) -> Engines:
    """The engines, none of them started. `python` has vLLM."""
    endpoint, _ = parse_endpoint(MANIFEST, source="engines that may be killed")
    ports = engine_ports(2 * COUNT, LOOPBACK)  # none that the kernel gives to connections meanwhile
    made = plan(endpoint, detect(python), model, ports, lease_seconds=LEASE_SECONDS)
    return Engines.of(made.engines, folder)
