"""The control loop beside a real API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem.kube import Object
from tandem.operator import render

from ..endpoints import SETTINGS, endpoint
from .conftest import DECODE, World, operating

pytestmark = pytest.mark.timeout(300)  # the first one waits for the server


async def test_an_endpoint_becomes_what_render_prints(world: World) -> None:
    manifest = world.manifest()
    await world.apply(manifest)
    wanted = render(endpoint("dpd-nixl", {"metadata.namespace": world.namespace}), SETTINGS).objects
    names = {f"{o['kind']}/{o['metadata']['name']}" for o in wanted}
    await world.until(world.has(*names), "the objects")
    found = await world.objects("deploy,svc,cm,netpol,pdb,ingress,sa,role,rolebinding")
    assert found.keys() == names
    uid = (await world.endpoint())["metadata"]["uid"]
    for made in found.values():
        owners = [owner["uid"] for owner in made["metadata"].get("ownerReferences", ())]
        assert owners == ([uid] if made["metadata"]["namespace"] == world.namespace else [])


async def test_its_status_goes_from_pending_to_complete(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.state("DeploymentPending"), "pending")
    await world.report_when_there("prefill-pd-hf", ready=False)
    await world.until(world.state("DeploymentInProgress"), "in progress")
    await world.deployed()
    await world.until(world.state("DeploymentComplete"), "complete")
    await world.kubectl("wait", "--for=condition=Ready", "iec/pd-hf", "-n", world.namespace, "--timeout=5s")
    message = await world.kubectl(
        "get", "iec", "pd-hf", "-n", world.namespace, "-o", "jsonpath={.status.conditions[0].message}"
    )
    assert message == "DPD prefill and decode deployments are ready"
    line = (await world.kubectl("get", "iec", "-n", world.namespace)).splitlines()[1].split()
    assert line[:5] == ["pd-hf", "DeploymentComplete", "1/1", "1/1", "1/1"]
    events = await world.kubectl("get", "events", "-n", world.namespace)
    assert "Deployed" in events


async def test_nothing_is_sent_for_an_endpoint_at_rest_and_a_new_operator_changes_nothing(
    world: World,
) -> None:
    await world.apply(world.manifest())
    await world.deployed()
    await world.until(world.state("DeploymentComplete"), "complete")
    await world.settled()
    before = world.client.sent.total()
    await asyncio.sleep(3)
    assert world.client.sent.total() == before
    objects = {name: o["metadata"]["resourceVersion"] for name, o in (await world.objects()).items()}
    objects["iec"] = (await world.endpoint())["metadata"]["resourceVersion"]
    async with operating(world.server) as second:
        await world.settled(second)
        assert second.sent.keys() == {"list", "watch"}
    after = {name: o["metadata"]["resourceVersion"] for name, o in (await world.objects()).items()}
    after["iec"] = (await world.endpoint())["metadata"]["resourceVersion"]
    assert after == objects


async def test_only_finalizer_and_status_of_the_endpoint_are_the_operators(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.state("DeploymentPending"), "its status")
    found = json.loads(
        await world.kubectl(
            "get", "iec", "pd-hf", "-n", world.namespace, "-o", "json", "--show-managed-fields"
        )
    )
    ours = [m for m in found["metadata"]["managedFields"] if m["manager"] == "tandem-operator"]
    written = {field for entry in ours for field in entry["fieldsV1"]}
    assert written == {"f:metadata", "f:status"}
    metadata = [m["fieldsV1"]["f:metadata"] for m in ours if "f:metadata" in m["fieldsV1"]]
    assert [list(m) for m in metadata] == [["f:finalizers"]]


async def test_an_edit_is_mended_and_a_deleted_object_made_again(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the deployments")
    await world.settled()
    image = (await world.objects())[DECODE]["spec"]["template"]["spec"]["containers"][0]["image"]
    await world.kubectl("set", "image", "deploy/decode-pd-hf", "*=evil:latest", "-n", world.namespace)

    async def mended() -> bool:
        container = (await world.objects())[DECODE]["spec"]["template"]["spec"]["containers"][0]
        return bool(container["image"] == image)

    await world.until(mended, "the image")
    await world.kubectl("delete", "svc", "decode-pd-hf", "-n", world.namespace)
    await world.until(world.has("Service/decode-pd-hf"), "the service")
    await world.kubectl(
        "label", "deploy", "decode-pd-hf", "tandem.dev/component=x", "--overwrite", "-n", world.namespace
    )

    async def labelled() -> bool:
        return bool((await world.objects())[DECODE]["metadata"]["labels"]["tandem.dev/component"] == "decode")

    await world.until(labelled, "the label")


async def test_a_change_reaches_the_objects(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the deployments")
    await world.apply(world.manifest(**{"spec.pdSpec.decodingSpec.replicas": 3}))

    async def scaled() -> bool:
        return bool((await world.objects())[DECODE]["spec"]["replicas"] == 3)

    await world.until(scaled, "three decoders")


async def test_to_colocated_and_back(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the decoders")
    await world.apply(world.manifest(**{"spec.pdSpec": ...}))

    async def colocated() -> bool:
        found = await world.objects()
        return "Deployment/pd-hf" in found and DECODE not in found and "Service/prefill-pd-hf" not in found

    await world.until(colocated, "colocated alone")
    await world.apply(world.manifest())

    async def back() -> bool:
        found = await world.objects()
        return DECODE in found and "Deployment/pd-hf" not in found

    await world.until(back, "disaggregated alone")


async def test_a_deleted_endpoint_leaves_nothing_and_its_router_goes_before_its_engines(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(f"Ingress/alb-pd-hf-{world.namespace}"), "all objects")
    with caplog.at_level("INFO"):
        await world.kubectl("delete", "iec", "pd-hf", "-n", world.namespace, "--timeout=20s")
    assert await world.objects() == {}
    said = [message for message in caplog.messages if message.startswith(("deleted Ing", "deleted Depl"))]
    balancer, router, *engines = (message.rpartition("/")[2] for message in said)
    assert (balancer, router) == (f"alb-pd-hf-{world.namespace}", f"pd-hf-{world.namespace}-router")
    assert set(engines) == {"prefill-pd-hf", "decode-pd-hf"}


async def test_what_lies_in_the_system_namespace_goes_also_when_the_finalizer_was_taken_off(
    world: World,
) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(f"Ingress/alb-pd-hf-{world.namespace}"), "all objects")
    await world.settled()
    patch = '{"metadata":{"finalizers":null}}'
    await world.kubectl("delete", "iec", "pd-hf", "-n", world.namespace, "--wait=false")
    await asyncio.to_thread(
        world.server.kubectl, "patch", "iec", "pd-hf", "-n", world.namespace, "--type=merge", "-p", patch
    )

    async def none() -> bool:
        return await world.objects() == {}

    await world.until(none, "nothing left")


async def test_objects_applied_by_hand_are_not_deleted_and_taken_over_by_their_endpoint(
    world: World,
) -> None:
    made = render(endpoint("dpd-nixl", {"metadata.namespace": world.namespace}), SETTINGS).objects
    listed = {"apiVersion": "v1", "kind": "List", "items": list(made)}
    await world.kubectl("apply", "-f", "-", stdin=listed)
    await world.settled()
    assert DECODE in await world.objects()
    await world.apply(world.manifest())

    async def taken() -> bool:
        return "ownerReferences" in (await world.objects())[DECODE]["metadata"]

    await world.until(taken, "an owner")
    await world.kubectl("delete", "iec", "pd-hf", "-n", world.namespace, "--timeout=20s")
    assert await world.objects() == {}


async def test_a_paused_endpoint_is_left_as_it_is(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the deployments")
    name = ("iec", "pd-hf", "-n", world.namespace)
    await world.kubectl("annotate", *name, "tandem.dev/paused=true")

    async def paused() -> bool:
        conditions = (await world.endpoint())["status"]["conditions"]
        return any(c["type"] == "Paused" for c in conditions)

    await world.until(paused, "the condition")
    await world.kubectl("scale", "deploy/decode-pd-hf", "--replicas=5", "-n", world.namespace)
    await world.settled()
    assert (await world.objects())[DECODE]["spec"]["replicas"] == 5
    await world.kubectl("annotate", *name, "tandem.dev/paused-")

    async def mended() -> bool:
        return bool((await world.objects())[DECODE]["spec"]["replicas"] == 1)

    await world.until(mended, "as it was")


async def test_an_endpoint_that_is_not_for_us_is_not_touched(world: World) -> None:
    await world.apply(world.manifest(**{"metadata.annotations": {"tandem.dev/managed": "false"}}))
    await world.settled()
    found = await world.endpoint()
    assert "finalizers" not in found["metadata"]
    assert "status" not in found
    assert await world.objects() == {}


async def test_a_mistake_is_told_and_what_runs_goes_on(world: World) -> None:
    await world.apply(world.manifest())
    await world.until(world.has(DECODE), "the deployments")
    await world.settled()
    await world.apply(world.manifest(**{"spec.worker.args": ["--tensor-parallel-size", "none"]}))
    await world.until(world.state("DeploymentFailed"), "its state")
    conditions = {c["type"]: c for c in (await world.endpoint())["status"]["conditions"]}
    assert conditions["Validated"]["status"] == "False"
    assert "spec.worker.args" in conditions["Validated"]["message"]
    assert DECODE in await world.objects()
    await world.apply(world.manifest())
    await world.until(world.state("DeploymentPending"), "recovery")


async def test_anothers_object_is_not_taken(world: World) -> None:
    await world.kubectl(
        "create", "configmap", "decode-pd-hf", "--from-literal=a=theirs", "-n", world.namespace
    )
    await world.apply(world.manifest())
    await world.until(world.state("DeploymentFailed"), "its state")
    message = (await world.endpoint())["status"]["conditions"][0]["message"]
    assert "ConfigMap decode-pd-hf" in message
    assert "another owner" in message
    theirs = json.loads(await world.kubectl("get", "cm", "decode-pd-hf", "-n", world.namespace, "-o", "json"))
    assert theirs["data"] == {"a": "theirs"}


SCALED = {
    "spec.pdSpec.autoScalingSpec.decodingAutoScaling": {
        "minReplicaCount": 1,
        "maxReplicaCount": 3,
        "cloudWatchTrigger": {"name": "x", "namespace": "n", "metricName": "m", "targetValue": 1},
    }
}
REPLICAS = "spec.pdSpec.decodingSpec.replicas"
SCALED_OBJECTS: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "scaledobjects.keda.sh"},
    "spec": {
        "group": "keda.sh",
        "scope": "Namespaced",
        "names": {"kind": "ScaledObject", "plural": "scaledobjects", "singular": "scaledobject"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}


def decoders(world: World, count: int) -> Callable[[], Any]:
    async def check() -> bool:
        found = (await world.objects()).get(DECODE)
        return found is not None and found["spec"]["replicas"] == count

    return check


async def test_without_keda_there_are_as_many_pods_as_the_resource_says_within_the_autoscalers_bounds(
    world: World,
) -> None:
    await world.apply(world.manifest(**SCALED, **{REPLICAS: 2}))
    await world.until(decoders(world, 2), "two decoders")
    await world.apply(world.manifest(**SCALED, **{REPLICAS: 9}))
    await world.until(decoders(world, 3), "no more than autoscaling would make")
    await world.settled()
    await world.kubectl("scale", "deploy/decode-pd-hf", "--replicas=5", "-n", world.namespace)
    await world.apply(world.manifest(**SCALED, **{REPLICAS: 9, "spec.pdSpec.routingThreshold": 7}))
    await world.settled()
    assert await decoders(world, 5)(), "by hand, as long as nothing scales"


async def test_with_keda_the_number_of_pods_is_the_resources_at_the_start_and_kedas_from_then_on(
    world: World,
) -> None:
    """KEDA's autoscaler writes, as `kubectl scale` does, the scale of a Deployment."""
    await world.apply(SCALED_OBJECTS)
    try:
        await world.apply(world.manifest(**{REPLICAS: 4}))
        await world.until(decoders(world, 4), "as many as the resource says")
        await world.apply(world.manifest(**SCALED, **{REPLICAS: 2}))
        await world.until(world.has_scaled_object("decode-pd-hf"), "an autoscaler")
        await world.settled()
        assert await decoders(world, 4)(), "an autoscaler that comes takes no pod away"
        await world.kubectl("scale", "deploy/decode-pd-hf", "--replicas=6", "-n", world.namespace)
        changed = {"spec.pdSpec.decodingSpec.args": ["--max-num-seqs", "17"], REPLICAS: 3}
        await world.apply(world.manifest(**SCALED, **changed))

        async def followed() -> bool:
            pod = (await world.objects())[DECODE]["spec"]["template"]["spec"]
            return "17" in pod["containers"][0]["args"]

        await world.until(followed, "the change")
        await world.settled()
        assert await decoders(world, 6)(), "a change of the resource takes no pod away either"
        await world.kubectl("delete", "iec", "pd-hf", "-n", world.namespace, "--timeout=20s")
        await world.apply(world.manifest(**SCALED, **{REPLICAS: 2}))
        await world.until(decoders(world, 2), "a new one as the resource says")
        await world.kubectl("delete", "iec", "pd-hf", "-n", world.namespace, "--timeout=20s")
    finally:
        await world.kubectl("delete", "crd", "scaledobjects.keda.sh", "--timeout=30s")


async def test_without_keda_autoscaling_is_a_condition(world: World) -> None:
    await world.apply(world.manifest(**SCALED))
    await world.until(world.has(DECODE), "the deployments")

    async def told() -> bool:
        conditions = (await world.endpoint()).get("status", {}).get("conditions", ())
        return any(c["reason"] == "KedaMissing" for c in conditions)

    await world.until(told, "the condition")
    await world.kubectl("annotate", "iec", "pd-hf", "-n", world.namespace, "tandem.dev/paused=true")

    async def paused() -> bool:
        return any(c["type"] == "Paused" for c in (await world.endpoint())["status"]["conditions"])

    await world.until(paused, "the pause")
    assert await told(), "a pause does not bring KEDA"
