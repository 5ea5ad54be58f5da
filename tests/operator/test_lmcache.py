"""LMCache's configuration, loaded by LMCache's own loaders: the pinned version's, and that of 0.4.3, which
HyperPod's images carry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api import Role
from tandem.operator.lmcache import lmcache_yaml
from tandem.operator.notes import notes

from ..api.conftest import lacking
from .endpoints import VARIANTS, engine, planned, rendered, variables

LOAD = """
import json, logging, os, sys
told = []
logging.Handler.handle = lambda self, record: told.append(record.getMessage())
from lmcache.v1.config import load_engine_config_with_overrides
found = []
for environment in json.loads(sys.argv[1]):
    told.clear()
    os.environ.update(environment)
    config = load_engine_config_with_overrides()
    for name in environment:
        del os.environ[name]
    values = {key: getattr(config, key, None) for key in sys.argv[2].split(",")}
    found.append({"values": values, "unknown": [m for m in told if "nknown" in m or "deprecated" in m]})
print(json.dumps(found, default=str))
"""
KEYS = (
    "chunk_size,local_cpu,max_local_cpu_size,save_unfull_chunk,enable_pd,transfer_channel,nixl_backends,pd_role,"
    "pd_buffer_size,pd_buffer_device,pd_proxy_host,pd_proxy_port,pd_peer_host,pd_peer_init_port,"
    "pd_peer_alloc_port,pd_backend_mode,remote_url,remote_serde,save_decode_cache,use_layerwise,extra_config"
)
OF_HYPERPOD = Path(os.environ.get("LMCACHE_0_4_3", Path(sys.prefix) / "lmcache-0.4.3"))


@pytest.fixture(params=["pinned", "0.4.3"])
def library(request: pytest.FixtureRequest) -> str:
    """A folder to import LMCache from; empty for the installed one."""
    if request.param == "pinned":
        pytest.importorskip("lmcache", reason="needs LMCache: run `make setup`")
        return ""
    if not (OF_HYPERPOD / "lmcache").is_dir():
        lacking(f"needs LMCache 0.4.3: pip install --no-deps --target {OF_HYPERPOD} lmcache==0.4.3")
    return str(OF_HYPERPOD)


Config = tuple[str, dict[str, str]]
"""The text of a file, and the variables of a container."""


def loaded(library: str, folder: Path, *configs: Config) -> list[dict[str, Any]]:
    """What LMCache makes of each."""
    environments = []
    for i, (text, given) in enumerate(configs):
        file = folder / f"lmcache-{i}.yaml"
        file.write_text(text, "utf-8")
        own = {k: v.replace("$(POD_IP)", "10.0.0.8") for k, v in given.items() if k.startswith("LMCACHE_")}
        environments.append({**own, "LMCACHE_CONFIG_FILE": str(file)})
    env = {**os.environ, **({"PYTHONPATH": library} if library else {})}
    words = [sys.executable, "-c", LOAD, json.dumps(environments), KEYS]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert [one["unknown"] for one in found if one["unknown"]] == [], "LMCache knows every key"
    return [one["values"] for one in found]


L2 = {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://r:6379"}


def test_every_configuration_is_read_as_it_is_written(library: str, tmp_path: Path) -> None:
    shapes = [
        *VARIANTS.values(),
        ("dpd-s3", {"spec.kvCacheSpec": {"enableL2Cache": True, "l2CacheSpec": L2}}),
    ]
    shapes.append(("dpd-s3", {"spec.instanceType": ...}))  # without EFA
    configs: list[Config] = []
    for shape in shapes:
        plan, made = planned(*shape), rendered(*shape)
        for pool in plan.pools:
            (of_pool,) = (
                o
                for o in made.objects
                if o["metadata"]["name"] == plan.names.pool(pool.role) and o["kind"] == "ConfigMap"
            )
            if "lmcache.yaml" in of_pool["data"]:
                configs.append((of_pool["data"]["lmcache.yaml"], variables(engine(made, pool.role))))
    written = [yaml.safe_load(text) for text, _ in configs]
    assert set().union(*written) <= set(KEYS.split(","))
    assert {key for keys in written for key in keys} >= {"remote_url", "pd_peer_init_port", "pd_proxy_host"}
    for keys, values in zip(written, loaded(library, tmp_path, *configs), strict=True):
        assert {key: values[key] for key in keys} == keys


@pytest.mark.parametrize("variant", ["dpd-s3", "dpd-nvme"])
def test_both_roles_are_halves_of_one_hand_off(library: str, tmp_path: Path, variant: str) -> None:
    plan, made = planned(*VARIANTS[variant]), rendered(*VARIANTS[variant])
    configs = [(lmcache_yaml(plan, pool), variables(engine(made, pool.role))) for pool in plan.pools]
    sender, receiver = loaded(library, tmp_path, *configs)
    for of_role in (sender, receiver):
        assert (of_role["enable_pd"], of_role["transfer_channel"]) == (True, "nixl")
        assert of_role["pd_buffer_size"] == {"dpd-s3": 8 << 30, "dpd-nvme": 16 << 30}[variant]
        assert of_role["nixl_backends"] == ["LIBFABRIC"]
        assert of_role["save_unfull_chunk"] is True
        assert of_role["chunk_size"] == 256
        assert of_role["save_decode_cache"] is False
        assert of_role["pd_backend_mode"] == ("sync" if not library else None)
    assert sender["pd_role"] == "sender"
    name = plan.names.name
    host = f"{name}-team-a-router-notify.hyperpod-inference-system.svc"
    assert (sender["pd_proxy_host"], sender["pd_proxy_port"]) == (host, 7500)
    assert (sender["local_cpu"], receiver["local_cpu"]) == (True, False)
    assert (receiver["pd_role"], receiver["pd_peer_host"]) == ("receiver", "10.0.0.8")
    assert receiver["pd_peer_init_port"] == list(range(7300, 7308))
    assert receiver["pd_peer_alloc_port"] == list(range(7400, 7408))


def test_an_l2_that_fails_does_not_end_hand_offs(library: str, tmp_path: Path) -> None:
    """LMCache's own policy is to do nothing any more, which is to hand nothing over."""
    shape = ("dpd-s3", {"spec.kvCacheSpec": {"enableL2Cache": True, "l2CacheSpec": L2}})
    plan, made = planned(*shape), rendered(*shape)
    pool = plan.pools[0]
    (prefill,) = loaded(library, tmp_path, (lmcache_yaml(plan, pool), variables(engine(made, pool.role))))
    assert prefill["extra_config"] == {"fallback_policy": "local_cpu"}


def test_colocated_workers_have_l1_and_the_shared_store(library: str, tmp_path: Path) -> None:
    plan, made = planned("colocated-routing"), rendered("colocated-routing")
    (found,) = loaded(library, tmp_path, (lmcache_yaml(plan, plan.pools[0]), variables(engine(made, None))))
    assert (found["enable_pd"], found["local_cpu"]) == (False, True)
    assert found["remote_url"] == "redis://redis.team-a.svc.cluster.local:6379"
    assert found["max_local_cpu_size"] == 16


def test_with_a_file_of_its_own_the_hand_off_comes_by_variables(library: str, tmp_path: Path) -> None:
    made = rendered(*VARIANTS["a configuration of LMCache's"])
    of_container = engine(made, Role.DECODE)
    assert variables(of_container)["LMCACHE_CONFIG_FILE"] == "/cfg/lmcache.yaml"
    assert "lmcache-config" not in {m["name"] for m in of_container["volumeMounts"]}
    file = "chunk_size: 512\nlocal_cpu: false\npd_role: sender\n"
    (found,) = loaded(library, tmp_path, (file, variables(of_container)))
    assert found["chunk_size"] == 256, "which the router counts in"
    assert (found["enable_pd"], found["pd_role"], found["save_unfull_chunk"]) == (True, "receiver", True)
    assert found["pd_peer_init_port"] == list(range(7300, 7308))
    assert found["pd_buffer_size"] == 8 << 30


def test_the_first_level_can_be_turned_off() -> None:
    plan = planned("dpd-s3", {"spec.kvCacheSpec.enableL1Cache": False})
    assert "local_cpu: false" in lmcache_yaml(plan, plan.pools[0])


def test_without_lmcache_there_is_no_file() -> None:
    made = rendered("dpd-nixl")
    assert "LMCACHE_CONFIG_FILE" not in variables(engine(made, Role.PREFILL))
    assert all("lmcache.yaml" not in o.get("data", {}) for o in made.objects)


def test_prefillers_have_a_shared_store_beside_l1_alone_and_that_is_told() -> None:
    """LMCache moves blocks through L1's memory, which with disaggregation is there for L1 alone."""
    store = {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://r:6379"}
    caches = {"enableL1Cache": False, "enableL2Cache": True, "l2CacheSpec": store}
    made = planned("dpd-s3", {"spec.kvCacheSpec": caches})
    assert "remote_url" not in lmcache_yaml(made, made.pool(Role.PREFILL))
    assert any("enableL2Cache: without effect" in note for note in notes(made))
    both = planned("dpd-s3", {"spec.kvCacheSpec": caches | {"enableL1Cache": True}})
    assert "remote_url" in lmcache_yaml(both, both.pool(Role.PREFILL))
    assert not any("enableL2Cache" in note for note in notes(both))


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\u2029"])
def test_no_text_of_the_resource_adds_a_key(end: str) -> None:
    """YAML ends a comment at each of these, and the model's name is in one."""
    forged = f"llama-3.3-70b{end}remote_url: redis://elsewhere:6379{end}"
    changes = {
        "spec.modelSourceConfig.modelLocation": forged,
        "spec.kvCacheSpec": {
            "enableL2Cache": True,
            "l2CacheSpec": {"l2CacheBackend": "redis", "l2CacheLocalUrl": f"redis://own:6379{end}x: y"},
        },
    }
    plan = planned("dpd-s3", {**changes, "spec.worker.environmentVariables": ...})
    for pool in plan.pools:
        found = yaml.safe_load(lmcache_yaml(plan, pool))
        assert found.get("remote_url") in (None, f"redis://own:6379{end}x: y")
        assert "x" not in found
    assert "as the name llama-3.3-70b" in lmcache_yaml(plan, plan.pools[-1])
