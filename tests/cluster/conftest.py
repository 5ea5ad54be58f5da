"""One real Kubernetes for the session, in which pods run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tandem.operator import Settings

from ..prompt.models import Model, byte_level
from . import raising
from .endpoint import LONG, SHORT
from .kube import Cluster
from .operating import Operator
from .report import report

KUBECONFIG = "TANDEM_TEST_KUBECONFIG"
ENGINE_IMAGES = ("vllm/vllm-openai:v0.32.0", "lmcache/vllm-openai:v0.4.3")
NODE_LABELS = {
    "topology.kubernetes.io/zone": "zone-a",
    "node.kubernetes.io/instance-type": "ml.g6e.12xlarge",
}
GPUS = 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_cluster = pytest.StashKey[Cluster]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report says how the cluster was."""
    made = yield
    cluster = item.config.stash.get(_cluster, None)
    if made.failed and cluster is not None and Path(__file__).parent in item.path.parents:
        made.sections.append(("cluster", report(cluster)))
    return made


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A cluster of two nodes in one zone, which say that they have GPUs, with the images that
    endpoints need: the real nginx and collector, the router, and simulated engines.

    TANDEM_TEST_KUBECONFIG names a cluster to take instead, which is there for tests: its nodes are labelled.
    They have to see this machine's files, as kind's do with extraMounts, and have the images.
    """
    kubeconfig = os.environ.get(KUBECONFIG)
    lack = None if kubeconfig else raising.lack()
    if lack and os.environ.get("CI") == "true":
        pytest.fail(lack)
    if lack:
        pytest.skip(lack)
    with raising.given(kubeconfig) if kubeconfig else raising.raised() as running:
        pytestconfig.stash[_cluster] = running
        try:
            _equip(running)
            yield running
        finally:
            del pytestconfig.stash[_cluster]


def _equip(cluster: Cluster) -> None:
    settings = Settings()
    for name in ENGINE_IMAGES:
        cluster.image(name, "vllm", "serve")
    cluster.image(settings.router_image, "tandem")
    cluster.image(settings.router_image.replace("/router:", "/operator:"), "tandem")
    cluster.image(settings.proxy_image, "nginx", "-g", "daemon off;")
    cluster.image(settings.collector_image, "/usr/local/tandem/kube/otelcol")
    labels = (f"{name}={value}" for name, value in NODE_LABELS.items())
    cluster.kubectl("label", "nodes", "--all", "--overwrite", *labels)
    for node in cluster.get("/api/v1/nodes")["items"]:
        reply = cluster.api.patch(
            f"/api/v1/nodes/{node['metadata']['name']}/status",
            json={"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}},
            headers={"content-type": "application/merge-patch+json"},
        )
        assert reply.status_code == 200, reply.text
    cluster.apply(
        [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.system_namespace}}]
    )


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Operator:
    """The operator as a pod, installed once, with the rights that its manifests give it."""
    installed = Operator(cluster)
    installed.install()
    cluster.wait_for("the operator", lambda: installed.ready() and installed.leads(), 90)
    return installed


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own; it is deleted without waiting for what is in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model without weights: a tokenizer, a chat template, a configuration."""
    made = Model(
        train=byte_level("<|im_start|>", "<|im_end|>"),
        template=TEMPLATE,
        settings={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
    )
    folder = made.write(tmp_path_factory.mktemp("models") / "tiny", [SHORT, LONG, "one two three four"])
    folder.chmod(0o755)
    return folder
