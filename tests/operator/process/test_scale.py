"""Thirty endpoints, with Kubernetes' controllers and pods made ready by kwok: what must hold at any size."""

from __future__ import annotations

import time

import pytest

from tandem.kube import resources as kinds
from tandem.operator.process.leader import LEASE_SECONDS, RENEWED

from ...api.conftest import _assets
from .plane import Cluster, cluster, plane, until
from .scale import at_rest, latencies, restarted, settle

ENDPOINTS = [f"e{number}" for number in range(30)]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_endpoints_at_rest_cost_a_lease_and_a_restart_writes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assets = _assets()
    if not (assets / "kwok").exists():
        pytest.skip("needs kwok and kwok-stages.yaml beside kube-apiserver (KUBEBUILDER_ASSETS)")
    with plane(assets, tmp_path_factory.mktemp("plane"), nodes=True) as made:
        async with cluster(made) as kube:
            await kube.namespace("many")
            with made.operator(name="one") as one:
                await settle(kube, "many", ENDPOINTS, 300)
                rest = await at_rest(one, seconds=20)
                assert {verb for verb, count in rest.requests.items() if count} <= {"get", "update", "watch"}
                lease = 60 / (LEASE_SECONDS * RENEWED)
                assert rest.requests["get"] <= lease + 3
                assert rest.requests["update"] <= lease + 3
                took = sorted(await latencies(kube, "many", ENDPOINTS, 30))
                assert took[len(took) // 2] < 10
                await until("all whole again", lambda: _whole(kube))
                await at_rest(one, seconds=1)
                one.process.terminate()
                one.process.wait()
            before = await _versions(kube)
            began = time.monotonic()
            with made.operator(name="two") as two:
                restart = await restarted(two, began, len(ENDPOINTS))
                assert restart.writes == 0
            assert await _versions(kube) == before

            # Weights that lie elsewhere, with the controllers that bind volumes and roll out.
            where = {"bucketName": "one", "region": "us-east-2"}
            source = {"modelSourceType": "s3", "modelLocation": "m", "s3Storage": where}
            await kube.apply("many", "weights", **{"spec.modelSourceConfig": source})
            with made.operator(name="three"):
                await until("it is whole", lambda: _whole(kube), 120)
                (old,) = (await kube.client.list(kinds.CLAIM, "many")).items
                assert old["status"]["phase"] == "Bound"
                where = {"bucketName": "another", "region": "us-east-2"}
                await kube.patch("many", "weights", {"modelSourceConfig": {"s3Storage": where}})

                async def moved() -> bool:
                    claims = (await kube.client.list(kinds.CLAIM, "many")).items
                    volumes = (await kube.client.list(kinds.VOLUME)).items
                    return (
                        [claim["status"].get("phase") for claim in claims] == ["Bound"]
                        and claims[0]["metadata"]["name"] != old["metadata"]["name"]
                        and [v["spec"]["csi"]["volumeAttributes"]["bucketName"] for v in volumes]
                        == ["another"]
                    )

                await until("the former volume to go", moved, 120)
                await until("it is whole", lambda: _whole(kube), 120)


async def _whole(kube: Cluster) -> bool:
    return set(await kube.states("many")) == {"DeploymentComplete"}


async def _versions(kube: Cluster) -> dict[str, str]:
    objects = await kube.objects("many")
    # Status is others'.
    return {
        name: o["metadata"].get("generation", o["metadata"]["resourceVersion"]) for name, o in objects.items()
    }
