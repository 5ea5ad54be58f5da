"""How the weights come into model pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.api import Role
from tandem.api.conventions import RESERVED_VOLUMES, clash
from tandem.operator import RenderError

from .endpoints import SETTINGS, VARIANTS, changed, container, named, of_kind, pod, rendered


def volume(of_pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(v for v in of_pod["volumes"] if v["name"] == name)


def mount(of_container: dict[str, Any], path: str = "/opt/ml/model") -> dict[str, Any]:
    return next(m for m in of_container["volumeMounts"] if m["mountPath"] == path)


def test_s3_is_mounted_by_its_driver() -> None:
    made = rendered("dpd-s3")
    claim = volume(pod(made, Role.DECODE), "model-weights")["persistentVolumeClaim"]
    found = named(made, "PersistentVolumeClaim", claim["claimName"])
    spec = named(made, "PersistentVolume", found["spec"]["volumeName"])["spec"]
    assert spec["csi"]["driver"] == "s3.csi.aws.com"
    assert spec["csi"]["volumeAttributes"]["bucketName"] == "my-models"
    assert {"region us-east-2", "prefix Llama-3.3-70B-Instruct/", "read-only"} <= set(spec["mountOptions"])
    assert spec["claimRef"]["name"] == claim["claimName"]


def test_fsx_is_mounted_by_its_driver() -> None:
    made = rendered("colocated-routing")
    (found,) = of_kind(made, "PersistentVolume")
    assert found["spec"]["csi"] == {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": "fs-1234abcd",
        "volumeAttributes": {"dnsname": "fs-1234abcd.fsx.us-east-2.amazonaws.com", "mountname": "fsx"},
    }
    assert {"flock", "ro"} <= set(found["spec"]["mountOptions"]), "whoever mounts the claim cannot write"
    assert any("mountName" in note for note in made.notes)


def test_fsx_without_a_name_or_region_is_told() -> None:
    with pytest.raises(RenderError, match=r"fsxStorage\.dnsName: is needed"):
        rendered("colocated-routing", {"spec.autoScalingSpec": ...}, replace(SETTINGS, region=None))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_finds_the_weights_read_only(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    for found in of_kind(made, "Deployment"):
        if found["metadata"]["labels"]["tandem.dev/component"] != "router":
            engine = found["spec"]["template"]["spec"]["containers"][0]
            assert mount(engine).get("readOnly", False) is (variant != "downloaded by the engine")


def test_prefetched_weights_are_copied_into_memory_first() -> None:
    made = rendered(*VARIANTS["prefetched from s3"])
    of_pod = pod(made, Role.PREFILL)
    copier = of_pod["initContainers"][0]
    assert volume(of_pod, "model-weights-copy")["emptyDir"] == {"medium": "Memory"}
    assert mount(copier, "/source")["name"] == "model-weights"
    assert mount(copier)["name"] == mount(of_pod["containers"][0])["name"] == "model-weights-copy"
    assert "copy_weights.py" in made.objects[[o["kind"] for o in made.objects].index("ConfigMap")]["data"]
    assert volume(of_pod, "parallel-copy-configmap")


def test_a_model_of_the_hub_is_downloaded_first_and_only_there_is_the_token() -> None:
    of_pod = pod(rendered("dpd-huggingface"), Role.DECODE)
    downloader = of_pod["initContainers"][0]
    assert downloader["name"] == "hf-model-downloader"
    assert "meta-llama/Llama-3.3-70B-Instruct" in downloader["command"]
    token = next(v for v in downloader["env"] if v["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf-token-secret", "key": "token"}
    assert mount(downloader)["name"] == mount(of_pod["containers"][0])["name"] == "model-weights"


def test_a_commit_is_downloaded_where_one_is_pinned() -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    made = rendered("dpd-nixl", {"spec.modelSourceConfig.huggingFaceModel.commitSHA": sha})
    command = pod(made, Role.DECODE)["initContainers"][0]["command"]
    assert command[command.index("--revision") + 1] == sha


def test_a_volume_of_the_resource_is_mounted_as_it_is() -> None:
    made = rendered("dpd-nvme")
    found = volume(pod(made, Role.PREFILL), "model-weights")["hostPath"]
    assert found == {"path": "/opt/dlami/nvme/Llama-3.3-70B-Instruct", "type": "Directory"}
    assert not of_kind(made, "PersistentVolume")


def test_a_volume_that_is_not_there_is_told() -> None:
    with pytest.raises(RenderError, match=r"modelVolumeMount\.name: is 'model-weights', but no volume"):
        rendered("dpd-nvme", {"spec.kubernetes.volumes": [{"name": "other", "emptyDir": {}}]})


def test_the_resources_init_containers_run_after_the_fetcher() -> None:
    own = [{"name": "sync", "image": "registry.example/sync:1"}]
    made = rendered("dpd-nixl", {"spec.kubernetes": {"initContainers": own}})
    names = [c["name"] for c in pod(made, Role.DECODE)["initContainers"]]
    assert names == ["hf-model-downloader", "sync"]


def test_account_and_scheduler_are_the_resources() -> None:
    made = rendered(*VARIANTS["its own init container and account"])
    of_pod = pod(made, Role.DECODE)
    assert (of_pod["serviceAccountName"], of_pod["schedulerName"]) == ("models", "gang")
    assert "models" not in {a["metadata"]["name"] for a in of_kind(made, "ServiceAccount")}


@pytest.mark.parametrize("name", ["dpd-s3", "dpd-huggingface", "dpd-nvme", "dpd-nixl"])
def test_the_proxy_sees_the_tokenizers_files(name: str) -> None:
    proxy = container(pod(rendered(name), Role.DECODE), "sidecar-reverse-proxy")
    assert mount(proxy)["readOnly"] is True


def test_of_a_file_system_the_models_folder_is_mounted() -> None:
    made = rendered("colocated-routing")
    engine, proxy = (container(pod(made, None), name) for name in ("chat-8b", "sidecar-reverse-proxy"))
    assert mount(engine)["subPath"] == mount(proxy)["subPath"] == "Llama-3.1-8B-Instruct"
    prefetched = pod(rendered("colocated-routing", {"spec.modelSourceConfig.prefetchEnabled": True}), None)
    assert mount(prefetched["initContainers"][0], "/source")["subPath"] == "Llama-3.1-8B-Instruct"
    assert "subPath" not in mount(prefetched["containers"][0])
    whole = rendered("colocated-routing", {"spec.modelSourceConfig.modelLocation": "/"})
    assert "subPath" not in mount(pod(whole, None)["containers"][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_added_to_model_pods_cannot_be_chosen(variant: str) -> None:
    """The API knows no rendered object, and judges by names and folders of its own."""
    given = changed(*VARIANTS[variant])["spec"]
    own = {v["name"] for v in given.get("kubernetes", {}).get("volumes", ())}
    own |= {given["worker"]["modelVolumeMount"]["name"], "scratch"}
    for found in of_kind(rendered(*VARIANTS[variant]), "Deployment"):
        of_pod = found["spec"]["template"]["spec"]
        if found["metadata"]["labels"]["tandem.dev/component"] != "router":
            assert {v["name"] for v in of_pod["volumes"]} - own <= {*RESERVED_VOLUMES}
            for m in of_pod["containers"][0]["volumeMounts"]:
                assert bool(clash(m["mountPath"])) is (m["name"] not in own | {"model-weights-copy"})
