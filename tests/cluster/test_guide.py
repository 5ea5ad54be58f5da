"""docs/kubernetes.md, as someone follows it: its manifest and all its commands, in their order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..docs.pages import ROOT, blocks
from .kube import Cluster
from .operating import Managed, Operator

PAGE = "kubernetes.md"
NAMESPACE = "default"
WITH_GPU = "resources: {limits: {nvidia.com/gpu: 1}}"
ON_TWO_CORES = "resources: {limits: {nvidia.com/gpu: 1}, requests: {cpu: 50m, memory: 128Mi}}"
"""What the engines of these tests need; a real one takes what is rendered for it."""

VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: llama-weights}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  claimRef: {name: llama-weights, namespace: default}
  hostPath: {path: MODEL}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: llama-weights, namespace: default}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  volumeName: llama-weights
  resources: {requests: {storage: 1Gi}}
"""


def commands() -> list[str]:
    """Those of the page, without the two that build images: these are there."""
    lines = (line for _, text in blocks("sh", PAGE) for line in text.splitlines())
    return [line for line in lines if not line.startswith("docker ")]


@pytest.fixture
def endpoint(cluster: Cluster, operator: Operator, model: Path) -> Iterator[Managed]:
    """That of the page, before it is applied; the claim for its weights is there."""
    volume = VOLUME.replace("MODEL", str(model))
    cluster.apply(volume)
    made = Managed(cluster, {"metadata": {"name": "llama", "namespace": NAMESPACE}})
    yield made
    made.delete("--ignore-not-found")
    cluster.wait_for("an end of all", lambda: not made.left(), 90)
    cluster.kubectl("delete", "-f", "-", "--wait=false", stdin=volume)


def test_the_guides_commands_do_what_it_says(endpoint: Managed, tmp_path: Path) -> None:
    cluster = endpoint.cluster
    ((_, manifest),) = blocks("yaml", PAGE)
    assert manifest.count(WITH_GPU) == 2
    (tmp_path / "llama.yaml").write_text(manifest.replace(WITH_GPU, ON_TWO_CORES), "utf-8")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    told: list[tuple[str, str]] = []
    forwarded: subprocess.Popen[bytes] | None = None
    try:
        for command in commands():
            if "port-forward" in command:
                forwarded = subprocess.Popen([*cluster.enter, *command.split()], env=cluster.environment)
                continue
            retries = "--retry 20 --retry-connrefused --retry-delay 1" if command.startswith("curl") else ""
            line = command.replace("curl ", f"curl -sS {retries} ", 1) if retries else command
            done = cluster.run("bash", "-c", f"cd {tmp_path}; {line}", seconds=180)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            told.append((command, done.stdout))
    finally:
        if forwarded is not None:
            forwarded.terminate()
            forwarded.wait()

    def said(beginning: str) -> str:
        return next(text for command, text in told if command.startswith(beginning))

    assert "successfully rolled out" in said("kubectl rollout status")
    assert "condition met" in said("kubectl wait --for=condition=Ready")
    assert "condition met" in said("kubectl wait --for=condition=PrefillReady")
    assert "DeploymentComplete" in said("kubectl get iec")
    assert '"chat.completion"' in said("curl")
    assert "[INFO] Conditional routing: estimated_tokens=" in said("kubectl logs")
    assert re.search(r"Normal +Deployed ", said("kubectl describe iec"))
    cluster.wait_for("two prefillers", lambda: len(endpoint.pods("prefill")) == 2 and endpoint.complete(), 90)
    said_last = endpoint.condition("Ready")["message"]
    assert said_last == "DPD prefill and decode deployments are ready"
