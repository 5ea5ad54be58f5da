"""Collectors' configurations, judged by a real collector, and what they scrape and export."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.operator import Settings

from ..api.conftest import assets_folder, lacking
from .endpoints import SETTINGS, VARIANTS, of_kind, rendered

AMAZON = "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-1/api/v1/remote_write"


@pytest.fixture(scope="session")
def otelcol() -> Path:
    """The collector."""
    found = shutil.which("otelcol", path=f"{assets_folder()}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        lacking(
            "needs otelcol (OpenTelemetry collector, contrib) in PATH or in the folder of KUBEBUILDER_ASSETS"
        )
    return Path(found)


def configs(variant: str, settings: Settings = SETTINGS) -> dict[str, str]:
    """Config map → the collector's configuration in it."""
    name, changes = VARIANTS[variant]
    maps = of_kind(rendered(name, changes, settings), "ConfigMap")
    return {m["metadata"]["name"]: m["data"]["collector.yaml"] for m in maps if "collector.yaml" in m["data"]}


def validated(otelcol: Path, folder: Path, text: str) -> None:
    file = folder / "collector.yaml"
    file.write_text(text, "utf-8")
    env = {**os.environ, "POD_NAME": "p", "NODE_NAME": "n"}
    env |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}  # in a cluster, the node's role
    done = subprocess.run(
        [otelcol, "validate", f"--config={file}"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_collector_takes_every_configuration(otelcol: Path, tmp_path: Path, variant: str) -> None:
    found = configs(variant)
    assert bool(found) is (variant != "without metrics")
    for text in found.values():
        validated(otelcol, tmp_path, text)


@pytest.mark.parametrize("variant", ["dpd-s3", "colocated-routing"])
@pytest.mark.parametrize("url", ["http://prometheus.monitoring:9090/api/v1/write", AMAZON])
def test_it_takes_a_prometheus_to_write_to(otelcol: Path, tmp_path: Path, variant: str, url: str) -> None:
    for text in configs(variant, replace(SETTINGS, remote_write_url=url)).values():
        assert url in text
        validated(otelcol, tmp_path, text)


def targets(text: str) -> dict[str, str]:
    config: dict[str, Any] = yaml.safe_load(text)
    return {
        job["job_name"]: job["static_configs"][0]["targets"][0] + job["metrics_path"]
        for job in config["receivers"]["prometheus"]["config"]["scrape_configs"]
    }


def test_engine_proxy_and_router_are_scraped() -> None:
    found = configs("dpd-s3")
    for pool in ("prefill-pd-s3", "decode-pd-s3"):
        assert targets(found[pool]) == {"engine": "127.0.0.1:8000/metrics", "proxy": "127.0.0.1:9113/metrics"}
    assert targets(found["pd-s3-team-a-router"]) == {"router": "127.0.0.1:8001/metrics"}


def test_an_engines_own_labels_stay_as_they_are() -> None:
    """vLLM's dashboards look for its own model_name."""
    for text in configs("dpd-s3").values():
        jobs = yaml.safe_load(text)["receivers"]["prometheus"]["config"]["scrape_configs"]
        assert all(job["honor_labels"] for job in jobs)


@pytest.mark.parametrize("metrics", [{}, {"modelMetrics": {}}, {"modelMetrics": {"port": 8080}}])
def test_the_schemas_default_port_means_the_one_that_the_engine_serves_on(metrics: dict[str, Any]) -> None:
    maps = of_kind(rendered("dpd-nvme", {"spec.metrics": metrics}), "ConfigMap")
    text = next(m["data"]["collector.yaml"] for m in maps if m["metadata"]["name"] == "decode-pd-nvme")
    assert targets(text)["engine"] == "127.0.0.1:8000/metrics"


def test_without_metrics_there_is_no_collector() -> None:
    made = rendered(*VARIANTS["without metrics"])
    for found in of_kind(made, "Deployment"):
        names = [c["name"] for c in found["spec"]["template"]["spec"]["containers"]]
        assert "otel-collector" not in names
    assert not configs("without metrics")


def test_the_collector_fills_nothing_in_that_the_resource_says(otelcol: Path, tmp_path: Path) -> None:
    """It knows `${env:…}` and `${file:…}`: what it read would be in everybody's metrics, and a router's
    collector is in the system namespace."""
    (tmp_path / "token").write_text("not-for-you", "utf-8")
    said = "m-${file:token}-$${env:POD_NAME}-$(HOME)"
    changes = {"spec.modelName": said}
    for found in of_kind(rendered("dpd-s3", changes), "ConfigMap"):
        text = found["data"]["collector.yaml"]
        file = tmp_path / "collector.yaml"
        file.write_text(text, "utf-8")
        words = [otelcol, "print-config", f"--config={file}"]
        env = {**os.environ, "POD_NAME": "p", "NODE_NAME": "n"}
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        jobs = yaml.safe_load(done.stdout)["receivers"]["prometheus"]["config"]["scrape_configs"]
        labels = [job["static_configs"][0]["labels"] for job in jobs]
        assert {label["model_name"] for label in labels} == {said}
        assert {label["pod_name"] for label in labels} == {"p"}
