"""The command in this process, on a machine that is always the same."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tandem.engine
import tandem.local.plan
import tandem.local.preflight
from tandem.cli import main
from tandem.engine import Core, EnginePorts, Machine

from ..local.models import model_folder


@dataclass
class Result:
    code: int
    out: str
    err: str


Tandem = Callable[..., Result]


@pytest.fixture
def tandem_command(capsys: pytest.CaptureFixture[str]) -> Tandem:
    """Run `tandem ARGUMENTS…` here."""

    def run(*arguments: object) -> Result:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as end:  # argparse's way
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """Also where whoever runs the tests ignores them, as nohup does hang-ups."""
    own = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores without a GPU, all ports free, and a home of its own."""

    def detect(python: str, **options: Any) -> Machine:
        return Machine(
            cores=tuple(Core((i,)) for i in range(4)),
            gpus=(),
            memory_bytes=16 << 30,
            accelerator="cpu",
            python=python,
        )

    def engine_ports(count: int, host: str, *, but: Any, ranks: int) -> list[EnginePorts]:
        return [
            EnginePorts(8100 + i, 5600 + i, init=(7300 + i,) * ranks, alloc=(7400 + i,) * ranks)
            for i in range(count)
        ]

    monkeypatch.setattr(tandem.engine, "detect", detect)
    monkeypatch.setattr(tandem.local.plan, "engine_ports", engine_ports)
    monkeypatch.setattr(tandem.local.preflight, "require_free", lambda port, host: None)
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A valid endpoint that has a field without meaning on one machine."""
    file = tmp_path / "endpoint.yaml"
    file.write_text(MANIFEST)
    return file


MANIFEST = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: small}
spec:
  modelName: small
  loadBalancer: {healthCheckPath: /health}
  modelSourceConfig: {modelSourceType: s3, s3Storage: {bucketName: models, region: us-east-2}}
  pdSpec: {prefillSpec: {}, decodingSpec: {}}
  worker:
    image: vllm
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights}
    resources: {}
"""
