"""docs/validate.md shows the rules as they are, and output as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.api.validation import RULES, read_manifest
from tandem.engine.validation import validate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "validate.md"

EXAMPLE = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: pd}
spec:
  modelName: llama
  instanceType: ml.p5.48xlarge
  modelSourceConfig:
    modelSourceType: s3
    s3Storage: {bucketName: models, region: us-east-2}
  pdSpec:
    routingTreshold: 2048
    prefillSpec:
      replicas: 0
      args: ["--max-model-len", long]
      resources: {limits: {nvidia.com/gpu: 1}}
    decodingSpec:
      replicas: 2
      resources: {limits: {nvidia.com/gpu: 1}}
  worker:
    image: vllm/vllm-openai:v0.19.0
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: weights}
    resources: {}
"""


@pytest.mark.table
def test_the_rules_are_listed(documented: Callable[[str, str, str], None]) -> None:
    rows = [
        f"| {rule.id} | {rule.severity} | {'API server' if rule.api_server else ''} | {rule.title} |\n"
        for rule in RULES.values()
    ]
    documented("validate.md", "rules", "".join(["| Rule | | | |\n|---|---|---|---|\n", *rows]))


def test_the_output_that_is_shown_is_real() -> None:
    shown = re.search(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    (document,) = read_manifest(EXAMPLE, "endpoint.yaml").documents
    report = validate(document.resource, lines=document.lines)
    assert [str(f) for f in report.findings] == shown[1].splitlines()
