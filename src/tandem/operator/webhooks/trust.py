"""Telling API servers which certificate our webhooks have."""

from __future__ import annotations

import logging

from tandem.api.crd import NAME
from tandem.kube import ApiError, Client, Object
from tandem.kube import resources as kinds
from tandem.operator.control.owned import MANAGER
from tandem.operator.names import WEBHOOK

CONVERT_PATH, VALIDATE_PATH = "/convert", "/validate"

_ATTEMPTS = 5

log = logging.getLogger(__name__)


async def trust(client: Client, service: str, namespace: str, bundle: str) -> None:
    """Write the certificate into the resource's definition and the webhook's configuration, where it is not
    there already. Raises KubeError."""
    await _conversion(client, service, namespace, bundle)
    for attempt in range(_ATTEMPTS):
        try:
            await _validation(client, bundle)
            break
        except ApiError as error:
            # A conflict: another replica does the same.
            if not error.conflict or attempt == _ATTEMPTS - 1:
                raise


async def _conversion(client: Client, service: str, namespace: str, bundle: str) -> None:
    definition = await client.get(kinds.DEFINITION, NAME)
    if definition is None:
        return
    wanted: Object = {
        "strategy": "Webhook",
        "webhook": {
            "conversionReviewVersions": ["v1"],
            "clientConfig": {
                "caBundle": bundle,
                "service": {"name": service, "namespace": namespace, "path": CONVERT_PATH, "port": 443},
            },
        },
    }
    if definition["spec"].get("conversion") != wanted:
        await client.patch(kinds.DEFINITION, NAME, None, {"spec": {"conversion": wanted}}, manager=MANAGER)
        log.info("the definition %s converts by this operator's webhook", NAME)


async def _validation(client: Client, bundle: str) -> None:
    found = await client.get(kinds.VALIDATING_WEBHOOK, WEBHOOK)
    if found is None:
        log.info(
            "there is no ValidatingWebhookConfiguration %s: resources are judged by status only", WEBHOOK
        )
        return
    webhooks = found.get("webhooks") or []
    if any(w["clientConfig"].get("caBundle") != bundle for w in webhooks):
        changed = [w | {"clientConfig": w["clientConfig"] | {"caBundle": bundle}} for w in webhooks]
        patch = {
            "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
            "webhooks": changed,
        }
        await client.patch(kinds.VALIDATING_WEBHOOK, WEBHOOK, None, patch, manager=MANAGER)
