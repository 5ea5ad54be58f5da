"""Whether the cluster is ours to work in."""

from __future__ import annotations

from tandem.api.crd import NAME
from tandem.api.crd.definition import LABELS
from tandem.kube import Client, Object
from tandem.kube import resources as kinds

HYPERPOD_DEPLOYMENT = "hyperpod-inference-operator-controller-manager"
"""The name of HyperPod's operator, and of ours where it stands in for it."""


class NotAlone(Exception):
    """The operator must not work here. Says why, and what to do."""


async def check_alone(client: Client, system_namespace: str, *, take_over: bool) -> None:
    """Raises NotAlone where the resource's definition is missing, or it or an operator is not ours and
    `take_over` is not set; KubeError where the API server does not answer."""
    definition = await client.get(kinds.DEFINITION, NAME)
    if definition is None:
        raise NotAlone(
            f"the cluster has no definition {NAME}: apply it first (tandem crd | kubectl apply -f -)"
        )
    if take_over:
        return
    check_definition(definition)
    deployment = await client.get(kinds.DEPLOYMENT, HYPERPOD_DEPLOYMENT, system_namespace)
    if deployment is not None and not _ours(deployment):
        raise NotAlone(
            f"another operator is installed: Deployment {system_namespace}/{HYPERPOD_DEPLOYMENT} lacks the "
            f"label {_text(LABELS)}. Two operators would undo each other's work: remove it, or start with "
            "--take-over"
        )


def check_definition(definition: Object) -> None:
    """Raises NotAlone where it is not ours."""
    if not _ours(definition):
        raise NotAlone(
            f"the definition {NAME} belongs to another owner (it lacks the label "
            f"{_text(LABELS)}): remove that operator first, or start with --take-over"
        )


def _ours(found: Object) -> bool:
    return LABELS.items() <= (found["metadata"].get("labels") or {}).items()


def _text(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())
