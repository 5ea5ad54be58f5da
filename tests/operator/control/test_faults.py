"""What others do to an endpoint's objects, and what a cluster refuses: beside a real API server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from tandem.kube import Object
from tandem.operator import render
from tandem.operator.control import controller
from tandem.operator.control.desired import UID_ANNOTATION, Desired, desired
from tandem.operator.settings import Settings

from ...api.conftest import new_namespace
from ..endpoints import ROUTER_NAMESPACE, SETTINGS, endpoint
from .conftest import DECODE, WAIT_SECONDS, World

pytestmark = pytest.mark.timeout(300)  # the first one waits for the server


async def test_labels_that_someone_takes_off_or_changes_come_back_and_nothing_is_made_anew(
    world: World,
) -> None:
    """Not by the endpoint whose name they have then, nor where there is none of that name."""
    await world.apply(world.manifest())
    await world.apply(world.manifest(**{"metadata.name": "other"}))
    await world.until(world.has(DECODE, "Deployment/decode-other"), "the deployments")
    await world.settled()
    where = ("-n", world.namespace, "-o", "jsonpath={.metadata.uid} {.metadata.labels}")
    before = await world.kubectl("get", "deploy", "decode-pd-hf", *where)
    for label in (
        "tandem.dev/endpoint-",
        "tandem.dev/endpoint=other",
        "tandem.dev/endpoint=nobody",
        "app.kubernetes.io/managed-by-",
        "app.kubernetes.io/managed-by=Helm",
    ):
        words = ("label", "deploy", "decode-pd-hf", label, "--overwrite", "-n", world.namespace)
        await world.kubectl(*words)

        async def mended() -> bool:
            return await world.kubectl("get", "deploy", "decode-pd-hf", *where) == before

        await world.until(mended, label)


async def test_fields_that_another_manager_takes_over_are_taken_back(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the deployments")
    await world.settled()
    theirs = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "decode-pd-hf", "namespace": world.namespace},
        "spec": {"replicas": 7, "template": {"spec": {"terminationGracePeriodSeconds": 1}}},
    }
    words = ("apply", "--server-side", "--force-conflicts", "--field-manager=gitops", "-f", "-")
    await world.kubectl(*words, stdin=theirs)

    async def mended() -> bool:
        spec = (await world.objects())[DECODE]["spec"]
        return spec["replicas"] == 1 and spec["template"]["spec"]["terminationGracePeriodSeconds"] > 1

    await world.until(mended, "the fields")


async def test_a_config_map_that_someone_locked_is_made_anew_when_it_has_to_change(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the deployments")
    await world.settled()
    where = ("configmap", "decode-pd-hf", "-n", world.namespace)
    before = json.loads(await world.kubectl("get", *where, "-o", "json"))
    changed = {key: f"{text}\n# edited" for key, text in before["data"].items()}
    patch = json.dumps({"immutable": True, "data": changed})
    await world.kubectl("patch", *where, "--type=merge", "-p", patch)

    async def mended() -> bool:
        found = json.loads(await world.kubectl("get", *where, "-o", "json", "--ignore-not-found") or "{}")
        return found.get("data") == before["data"]

    await world.until(mended, "the config")


async def test_weights_from_elsewhere_are_another_volume_and_the_former_goes_after_the_rollout(
    world: World,
) -> None:
    kinds = "pv,pvc,deploy"

    def manifest(bucket: str) -> Object:
        return world.manifest(
            "dpd-s3",
            **{"spec.modelSourceConfig.s3Storage": {"bucketName": bucket, "region": "us-east-2"}},
        )

    async def claims() -> dict[str, str]:
        found = await world.objects(kinds)
        return {
            name.partition("/")[2]: volume["spec"]["csi"]["volumeAttributes"]["bucketName"]
            for name, volume in found.items()
            if name.startswith("PersistentVolume/")
        }

    async def bucket_of_pods() -> str:
        found = await world.objects(kinds)
        pod = found["Deployment/decode-pd-s3"]["spec"]["template"]["spec"]
        (claim,) = [
            v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
        ]
        return (await claims())[found[f"PersistentVolumeClaim/{claim}"]["spec"]["volumeName"]]

    await world.apply(manifest("one"))
    await world.until(world.has("Deployment/decode-pd-s3"), "the deployments")
    await world.settled()
    assert await bucket_of_pods() == "one"
    await world.apply(manifest("two"))
    await world.settled()
    assert await bucket_of_pods() == "two"
    assert sorted((await claims()).values()) == ["one", "two"], "the former pods may come again"
    for name in ("prefill-pd-s3", "decode-pd-s3"):
        await world.report(name)
    await world.report(f"pd-s3-{world.namespace}-router", namespace=ROUTER_NAMESPACE)

    async def former_leaves() -> bool:
        found = await world.objects(kinds)
        leaving = [name for name, there in found.items() if "deletionTimestamp" in there["metadata"]]
        return len(leaving) == 2  # their finalizers are a controller's, which does not run here

    await world.until(former_leaves, "volume and claim to go")
    for resource in ("pv", "pvc"):
        selector = f"-l=tandem.dev/endpoint-namespace={world.namespace}"
        names = (await world.kubectl("get", resource, "-A", selector, "-o", "name")).split()
        for name in names:
            patch = ("--type=merge", "-p", '{"metadata":{"finalizers":null}}')
            await world.kubectl("patch", name, "-n", world.namespace, *patch)


async def test_a_volume_whose_claim_was_deleted_is_made_anew(world: World) -> None:
    await world.apply(world.manifest("dpd-s3"))
    await world.until(world.has("Deployment/decode-pd-s3"), "the deployments")
    await world.settled()
    (volume,) = (await world.objects("pv")).values()
    name = volume["metadata"]["name"]
    await world.kubectl("patch", "pv", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    status = ("--subresource=status", "--type=merge", "-p", '{"status":{"phase":"Released"}}')
    await world.kubectl("patch", "pv", name, *status)

    async def anew() -> bool:
        found = (await world.objects("pv")).values()
        return [
            o["metadata"]["name"] for o in found if o["metadata"]["uid"] != volume["metadata"]["uid"]
        ] == [name]

    await world.until(anew, "another volume of this name")


async def test_a_quota_is_told_and_what_it_kept_out_is_made_when_it_is_raised(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "REFUSED_AGAIN_SECONDS", 0.5)
    # A quota counts where its controller has written what is used.
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": world.namespace},
        "spec": {"hard": {"count/configmaps": "0", "configmaps": "0"}},
    }
    await world.apply(quota)
    used = json.dumps(
        {"status": {"hard": quota["spec"]["hard"], "used": {"configmaps": "0", "count/configmaps": "0"}}}
    )  # type: ignore[index]
    words = ("quota", "few", "-n", world.namespace)
    await world.kubectl("patch", *words, "--subresource=status", "--type=merge", "-p", used)
    await world.apply(world.manifest())
    await world.until(world.state("DeploymentFailed"), "its state")
    conditions = {c["type"]: c for c in (await world.endpoint())["status"]["conditions"]}
    assert "ConfigMap decode-pd-hf" in conditions["ObjectsApplied"]["message"]
    assert "exceeded quota: few" in conditions["ObjectsApplied"]["message"]
    assert DECODE in await world.objects(), "the others are made"
    await world.kubectl("delete", *words)
    await world.until(world.has("ConfigMap/decode-pd-hf"), "the config map")
    await world.until(world.state("DeploymentPending"), "recovery")


async def test_an_admission_webhook_that_fails_for_one_endpoint_is_told_and_holds_up_no_other(
    world: World,
) -> None:
    """Of another project, as load balancers have them: it refuses Ingresses of one endpoint, by not being
    there."""
    hook = {
        "name": "ingress.elb.example",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "objectSelector": {"matchLabels": {"tandem.dev/endpoint": "pd-hf"}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ROUTER_NAMESPACE}},
        "rules": [
            {
                "apiGroups": ["networking.k8s.io"],
                "apiVersions": ["v1"],
                "resources": ["ingresses"],
                "operations": ["*"],
            }
        ],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": world.namespace},
        "webhooks": [hook],
    }
    (ingress,) = [
        o
        for o in render(endpoint("dpd-nixl", {"metadata.namespace": world.namespace}), SETTINGS).objects
        if o["kind"] == "Ingress"
    ]

    async def refused() -> bool:
        """The API server takes it up by a watch."""
        return bool(await asyncio.to_thread(world.server.refusals, ingress))

    await world.apply(configuration)
    try:
        await world.until(refused, "the webhook")
        await world.apply(world.manifest())
        await world.until(world.state("DeploymentFailed"), "its state")
        message = (await world.endpoint())["status"]["conditions"][0]["message"]
        assert "Ingress alb-pd-hf" in message
        assert "failed calling webhook" in message
        started = time.monotonic()
        for number in range(3):
            await world.apply(world.manifest(**{"metadata.name": f"good-{number}"}))
        ingresses = [f"Ingress/alb-good-{number}-{world.namespace}" for number in range(3)]
        await world.until(world.has(*ingresses), "the others")
        assert time.monotonic() - started < 15
        before = world.client.sent["patch"]
        await asyncio.sleep(5)
        assert world.client.sent["patch"] - before <= 5, "it is tried ever more rarely"
    finally:
        await world.kubectl("delete", "validatingwebhookconfiguration", world.namespace)
    await world.until(world.has(f"Ingress/alb-pd-hf-{world.namespace}"), "its own in the end")


INVALID: dict[str, dict[str, Any]] = {
    "args": {"spec.worker.args": ["--tensor-parallel-size", "none"]},
    "port": {"spec.worker.modelInvocationPort.containerPort": 9113},
    "annotation": {"metadata.annotations": {"tandem.dev/decode-env": "{not json"}},
    "extension": {"metadata.annotations": {"tandem.dev/no-such-thing": "x"}},
    "image": {"spec.worker.image": "not an image"},
}
"""What was stored while no webhook judged it."""


async def test_invalid_resources_say_which_field_is_wrong_and_the_others_go_on(world: World) -> None:
    for name, changes in INVALID.items():
        await world.apply(world.manifest(**{"metadata.name": name, **changes}))
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the good one")
    told = {}
    for name in INVALID:

        async def judged(name: str = name) -> bool:
            conditions = (await world.endpoint(name)).get("status", {}).get("conditions", ())
            told[name] = next((c for c in conditions if c["type"] == "Validated"), None)
            return told[name] is not None

        await world.until(judged, name)
    for name, changes in INVALID.items():
        (path,) = changes
        condition = told[name]
        assert condition is not None
        assert condition["status"] == "False", condition
        assert path.replace("metadata.annotations", "annotations") in condition["message"], condition
    assert not any("image" in name for name in await world.objects("deploy"))


async def test_labels_of_an_endpoint_in_another_namespace_are_nothing_to_it(world: World) -> None:
    """Whoever may write in any namespace may write them: they hold up no deletion, and tell nothing."""
    elsewhere = new_namespace(world.server)
    labels = {
        "app.kubernetes.io/managed-by": "tandem",
        "tandem.dev/endpoint": "pd-hf",
        "tandem.dev/endpoint-namespace": world.namespace,
        "tandem.dev/component": "decode",
    }
    metadata = {"name": "theirs", "namespace": elsewhere, "labels": labels}
    held = metadata | {"annotations": {UID_ANNOTATION: "none"}, "finalizers": ["example.com/hold"]}
    pod = {"containers": [{"name": "c", "image": "i"}], "automountServiceAccountToken": False}
    await world.kubectl("create", "serviceaccount", "default", "-n", elsewhere)
    await world.kubectl(
        "create", "-f", "-", stdin={"apiVersion": "v1", "kind": "ConfigMap", "metadata": held}
    )
    await world.kubectl(
        "create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
    )
    waits = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "so they say"}]
    patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": {"conditions": waits}}))
    await world.kubectl("patch", "pod", "theirs", "-n", elsewhere, *patch)
    await world.apply(world.manifest())
    await world.report_when_there("decode-pd-hf", ready=False)
    await world.settled()
    assert "so they say" not in json.dumps((await world.endpoint())["status"])
    await world.kubectl("delete", "iec", "pd-hf", "-n", world.namespace, "--timeout=20s")
    theirs = json.loads(await world.kubectl("get", "cm", "theirs", "-n", elsewhere, "-o", "json"))
    assert "deletionTimestamp" not in theirs["metadata"]


async def test_the_loop_goes_on_while_an_endpoint_is_rendered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with long annotations takes seconds, and the lease must be renewed meanwhile."""
    loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow(found: Object, settings: Settings) -> Desired:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(WAIT_SECONDS), "the loop stood still"
        return desired(found, settings)

    monkeypatch.setattr(controller, "desired", slow)
    await world.apply(world.manifest())
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    goes_on.set()
    await world.until(world.has(DECODE), "the deployments")
