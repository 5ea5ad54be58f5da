"""The operator as a pod, installed as its guide says: an endpoint from its first apply to its last object."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tandem.operator.names import WEBHOOK

from .endpoint import LONG, SYSTEM, manifest
from .kube import Cluster, ready
from .operating import DEPLOY, ENDPOINTS, GROUP, Managed, Operator, furnish, watching

TRANSCRIPT = "TANDEM_TEST_TRANSCRIPT"
"""Names a file for what HyperPod's commands print."""

VARIABLES = "DEPLOYMENT_NAME=dpd-test-deployment ENDPOINT_NAME=dpd-test NAMESPACE=default"
ASK = (
    "curl -sS -w '\\n%{http_code}\\n' $ROUTER_URL -H 'Content-Type: application/json' -d '{\"model\": "
    '"/opt/ml/model", "messages": [{"role": "user", "content": "\'"$PROMPT"\'"}], "max_tokens": MOST, '
    '"temperature": 0}\''
)


@pytest.fixture(scope="module")
def guided(cluster: Cluster, operator: Operator, model: Path) -> Iterator[Managed]:
    """The guide's endpoint, not applied yet."""
    endpoint = Managed(cluster, manifest("guide", "default"))
    furnish(cluster, "default", model)
    yield endpoint
    endpoint.delete("--wait=false", "--ignore-not-found")


class Shell:
    """A user's shell in the cluster: what one command sets counts for the next."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self._cluster = cluster
        self._state = folder / "state"
        self._state.write_text("", "utf-8")
        self._said: list[str] = []

    def __call__(self, command: str) -> str:
        """What it prints; the test fails where it fails."""
        script = f'. "{self._state}"; cd "{self.folder}"; set -o pipefail\n{command}\nstatus=$?\n'
        script += (
            f'set | grep -E "^[A-Z]+_(NAME|POD|URL)=|^(NAMESPACE|PROMPT)=" > "{self._state}"; exit $status'
        )
        done = self._cluster.run("bash", "-c", script)
        said = done.stdout + done.stderr
        self._said.append(f"$ {command}\n{said}")
        assert done.returncode == 0, f"{command}\n{said}"
        return done.stdout

    def transcript(self) -> str:
        return "\n".join(self._said)


def test_installing_again_changes_nothing(operator: Operator) -> None:
    for words in ((), (), ("--server-side",), ("--server-side",)):
        before = operator.cluster.get(f"{DEFINITIONS}/{PLURAL}.{GROUP}")
        operator.install(*words)
        after = operator.cluster.get(f"{DEFINITIONS}/{PLURAL}.{GROUP}")
        assert after["spec"] == before["spec"]
        assert after["spec"]["conversion"]["strategy"] == "Webhook"
        assert operator.ready()
        assert operator.leads()


def test_a_webhook_that_is_replaced_has_its_certificate_again_within_seconds(operator: Operator) -> None:
    """Without it, mistakes are told by nobody but the status."""
    cluster = operator.cluster

    def trusted() -> bool:
        return all("caBundle" in hook["clientConfig"] for hook in cluster.get(HOOKS)["webhooks"])

    cluster.wait_for("the certificate", trusted)
    cluster.kubectl("replace", "-f", str(DEPLOY / "webhook.yaml"))
    cluster.wait_for("the certificate", trusted, 10)


def test_an_endpoint_becomes_complete_state_by_state(guided: Managed) -> None:
    with watching(guided.cluster, ENDPOINTS, fieldSelector=f"metadata.name={guided.name}") as seen:
        guided.apply()
        guided.cluster.wait_for("the endpoint", guided.complete, 90)
        # Told no sooner than it is so.
        pods = [pod for component in ("prefill", "decode", "router") for pod in guided.pods(component)]
        assert [ready(pod) for pod in pods] == [True] * 3
        guided.cluster.wait_for("the watch", lambda: "DeploymentComplete" in seen.states)
    assert seen.states == ["DeploymentPending", "DeploymentInProgress", "DeploymentComplete"]
    words = ("--for=condition=Ready", f"inferenceendpointconfig/{guided.name}", "--timeout=5s")
    assert "condition met" in guided.cluster.kubectl("wait", *words)


def test_prefillers_go_on_with_the_next_router(guided: Managed) -> None:
    """Those of LMCache keep a connection to the router."""
    guided.cluster.wait_for("the endpoint", guided.complete, 90)
    (before,) = guided.pods("router")
    guided.cluster.kubectl("delete", "pod", "-n", SYSTEM, before["metadata"]["name"], "--wait=false")
    guided.cluster.wait_for("another router", lambda: [*map(ready, guided.pods("router"))] == [True])
    gone = f"/api/v1/namespaces/{SYSTEM}/pods/{before['metadata']['name']}"
    guided.cluster.wait_for("the old one's end", lambda: guided.cluster.get(gone) is None, 60)
    numbers = iter(range(1000))

    def handed_over() -> bool:
        reply = guided.ask(f"{next(numbers)} {LONG * 30}")
        return reply.status_code == 200 and "prefill time" in "".join(guided.routed(reply))

    guided.cluster.wait_for("a hand-off", handed_over, 30)


def test_the_commands_of_hyperpods_guide_print_what_it_says(guided: Managed, tmp_path: Path) -> None:
    guided.cluster.wait_for("the endpoint", guided.complete, 90)
    shell = Shell(guided.cluster, tmp_path)
    (tmp_path / "inference_endpoint_dpd_config.yaml").write_text(yaml.safe_dump(guided.resource), "utf-8")
    shell(VARIABLES)
    assert "unchanged" in shell("kubectl apply -f inference_endpoint_dpd_config.yaml")
    image = shell(
        "kubectl get deployment hyperpod-inference-operator-controller-manager "
        "-n hyperpod-inference-system \\\n"
        """  -o jsonpath='{.spec.template.spec.containers[?(@.name=="manager")].image}{"\\n"}'"""
    )
    assert "/operator:" in image
    pods = shell(
        'kubectl get pods -A | grep -E "prefill-${DEPLOYMENT_NAME}|decode-${DEPLOYMENT_NAME}|'
        '${DEPLOYMENT_NAME}-${NAMESPACE}-router"'
    )
    listed = [line.split()[:4] for line in pods.splitlines()]
    assert [
        (where, re.sub(r"-[a-z0-9]+-[a-z0-9]+$", "", name), *state) for where, name, *state in listed
    ] == [
        ("default", "decode-dpd-test-deployment", "3/3", "Running"),
        ("default", "prefill-dpd-test-deployment", "3/3", "Running"),
        ("hyperpod-inference-system", "dpd-test-deployment-default-router", "2/2", "Running"),
    ]
    message = shell(
        "kubectl get inferenceendpointconfig ${DEPLOYMENT_NAME} -n ${NAMESPACE} "
        """-o jsonpath='{.status.conditions[0].message}{"\\n"}'"""
    )
    assert message == "DPD prefill and decode deployments are ready\n"
    for role in ("prefill", "decode"):
        shell(
            f"{role.upper()}_POD=$(kubectl get pod -n ${{NAMESPACE}} "
            f"-l 'inference.sagemaker.aws.amazon.com/dpd-role={role}' "
            "-o jsonpath='{.items[0].metadata.name}')"
        )
    shell(
        "ROUTER_POD=$(kubectl get pods -n hyperpod-inference-system -o name "
        '| grep -- "${DEPLOYMENT_NAME}-${NAMESPACE}-router" | head -1)'
    )
    shell(
        "ROUTER_URL=http://${DEPLOYMENT_NAME}-${NAMESPACE}-routing-service."
        "hyperpod-inference-system.svc.cluster.local:443/v1/chat/completions"
    )
    shell("PROMPT='What is disaggregated prefill-decode in one sentence?'")
    short = shell(ASK.replace("MOST", "80"))
    assert re.search(r'"chat\.completion".*"finish_reason": ?"stop"', short)
    shell("PROMPT=$(printf 'The quick brown fox jumps over the lazy dog. %.0s' {1..600})")
    long = shell(ASK.replace("MOST", "30"))
    assert re.search(r'"chat\.completion".*"finish_reason": ?"length"', long)
    routed = shell(
        "kubectl logs $ROUTER_POD -n hyperpod-inference-system -c router-container --tail=20 \\\n"
        '  | grep -E "Conditional routing|prefill selection|prefill time|to decoder"'
    )
    for form in ROUTED:
        assert re.search(form, routed, re.MULTILINE), (form, routed)
    for role, said in (("prefill", "sender"), ("decode", "receiver")):
        told = shell(
            f"kubectl logs ${role.upper()}_POD -n ${{NAMESPACE}} -c {role}-${{DEPLOYMENT_NAME}} "
            "| grep -oE \"'pd_role': '[a-z]+'\" | sort -u"
        )
        assert told == f"'pd_role': '{said}'\n"
    assert shell(
        "kubectl logs $DECODE_POD -n ${NAMESPACE} -c decode-${DEPLOYMENT_NAME} "
        '| grep -E "Retrieved.*tokens.*throughput" | tail -2'
    )
    shell("kubectl delete inferenceendpointconfig ${DEPLOYMENT_NAME} -n ${NAMESPACE}")
    if os.environ.get(TRANSCRIPT):
        Path(os.environ[TRANSCRIPT]).write_text(shell.transcript(), "utf-8")


URL, NUMBER = r"http://[0-9.]+:8081", r"[0-9.]+"
ROUTED = (
    r"\[INFO\] Conditional routing: estimated_tokens=\d+, threshold=4096, disaggregate=True$",
    r"\[INFO\] Conditional routing: estimated_tokens=\d+, threshold=4096, disaggregate=False$",
    rf"\[INFO\] DPD prefill selection: .*selected {URL}",
    rf"\[INFO\] \S+ prefill time \(TTFT\): {NUMBER}",
    rf"\[INFO\] Routing request \S+ to decoder {URL} at {NUMBER}, process time = {NUMBER}",
)
PLURAL = "inferenceendpointconfigs"
HOOKS = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{WEBHOOK}"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
