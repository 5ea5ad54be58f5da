"""Fields that are accepted, as HyperPod has them, and do nothing here."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, location

_UNUSED = {
    "spec.InitialReplicaCount": "has no effect, as on HyperPod; use replicas",
    "spec.endpointName": "has no effect: Tandem makes no SageMaker endpoint",
    "spec.modelVersion": "has no effect: it is of a SageMaker endpoint, and Tandem makes none",
    "spec.tags": "has no effect: they are of a SageMaker endpoint, and Tandem makes none",
    "spec.dnsConfig": "has no effect: Tandem changes no DNS records",
    "spec.tlsConfig.tlsCertificateOutputS3Uri": "has no effect: Tandem writes to no bucket",
    "spec.s3UploaderResources": "has no effect: Tandem captures no data, so there is no uploader",
    "status": "is written by the operator; the API server drops it here. Take it out",
}
_UNUSED_SWITCHES = {
    "spec.inferenceGateway.enabled": "has no effect: Tandem works with no inference gateway",
    **{
        f"spec.dataCapture.{part}.enabled": "has no effect: Tandem captures no requests"
        for part in ("loadBalancer", "modelPod", "sagemakerEndpoint")
    },
}


def unused_checks(subject: Subject) -> Iterator[Found]:
    for path, why in _UNUSED.items():
        if subject.get(path) not in (None, "", [], {}):
            yield Found("IEC513", location(path), why)
    for path, why in _UNUSED_SWITCHES.items():
        if subject.flag(path, default=False):
            yield Found("IEC513", location(path), why)
    if subject.disaggregated and subject.has("spec.replicas"):
        yield Found(
            "IEC502",
            location("spec.replicas"),
            "has no effect with pdSpec; set replicas of prefillSpec and decodingSpec",
        )
    if subject.has("spec.dnsConfig") and not subject.has("spec.tlsConfig.customCertificateConfig"):
        yield Found(
            "IEC606",
            location("spec.dnsConfig"),
            "needs tlsConfig.customCertificateConfig on HyperPod, whose domainName the record is for",
        )
    yield from _node_caches(subject)


def _node_caches(subject: Subject) -> Iterator[Found]:
    cache, kind = "spec.modelCacheConfig.weightsCache", subject.text("spec.modelSourceConfig.modelSourceType")
    enabled = subject.flag(f"{cache}.enabled", default=False)
    if subject.has(f"{cache}.hostPath") and not enabled:
        yield Found("IEC515", location(f"{cache}.hostPath"), "has no effect without enabled: true beside it")
    if enabled and kind == "kubernetesVolume":
        yield Found(
            "IEC515",
            location(f"{cache}.enabled"),
            "has no effect with modelSourceType kubernetesVolume: nothing is fetched",
        )
    elif enabled:
        yield Found("IEC513", location(f"{cache}.enabled"), "has no effect: Tandem keeps no weights on nodes")
    images = "spec.modelCacheConfig.imageCache.enabled"
    if subject.flag(images, default=False):
        yield Found("IEC513", location(images), "has no effect: Tandem keeps no images on nodes")
