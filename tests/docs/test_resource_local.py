"""docs/resource.md tells the truth about one machine: each field changed, and what would be started."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.api import ANNOTATION_CONNECTOR, InvalidResource, read_endpoint
from tandem.engine import EngineError, Machine
from tandem.local.builtin import MODEL_ID
from tandem.local.errors import LocalError
from tandem.local.fields import without_local_meaning
from tandem.local.plan import make_plan

from ..local.test_plan import free_ports, home
from ..operator.endpoints import changed
from .fields import is_near, rows, schemas
from .variations import Manifest, place, sample, value_at, variants, with_sections, with_value

__all__ = ["free_ports", "home"]

Planned = Callable[[Manifest], Any]
"""What would be started, as plain data; None of a manifest that is invalid, a text of one that is refused."""


@pytest.fixture
def planned(machine: Machine) -> Planned:
    machine = replace(machine, lmcache="0.5.6")

    def plan(manifest: Manifest) -> Any:
        try:
            made = make_plan(read_endpoint(manifest), manifest, machine, "/venv/bin/python", dry=True)
        except InvalidResource:
            return None
        except (LocalError, EngineError) as error:
            return str(error)
        told = ("notes", "unusedFields")
        return {key: value for key, value in made.as_dict().items() if key not in told}

    return plan


@pytest.fixture
def bases(model: Path) -> tuple[Manifest, ...]:
    """An endpoint whose model lies in a folder, one with the built-in model, whose name no flag says, and one
    that hands over through LMCache."""
    another = {"spec.modelSourceConfig.fsxStorage": {"fileSystemId": "fs-1"}}
    volume = changed("dpd-nvme", {"spec.instanceType": ..., **another})
    volume["spec"]["kubernetes"]["volumes"][0]["hostPath"] = {"path": str(model)}
    hub = {"modelSourceType": "huggingface", "huggingFaceModel": {"modelId": MODEL_ID}}
    builtin = changed("dpd-nixl", {"spec.modelSourceConfig": hub, "spec.worker.args": []})
    for base in (volume, builtin):
        base["spec"]["worker"]["image"] = "vllm:1"
    l2 = {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://cache:6379"}
    caches = {"enableL1Cache": True, "enableL2Cache": True, "l2CacheSpec": l2}
    lmcache = copy.deepcopy(volume) | {
        "metadata": {"name": "e", "annotations": {ANNOTATION_CONNECTOR: "lmcache"}}
    }
    lmcache["spec"]["kvCacheSpec"] = caches
    return volume, builtin, lmcache


def rows_with(local: str) -> list[Any]:
    return [pytest.param(path, id=path) for row in rows() if row.local == local for path in row.paths]


def is_listed(manifest: Manifest, path: str) -> bool:
    return any(is_near(found, path) for found in without_local_meaning(manifest))


@pytest.mark.parametrize("path", rows_with("acted on"))
def test_what_is_acted_on_changes_what_is_started(
    planned: Planned, bases: tuple[Manifest, ...], path: str
) -> None:
    for base in bases:
        before = with_sections(base, path)
        for after in variants(before, path):
            if (made := planned(after)) is not None and made != planned(before):
                return
    pytest.fail(f"{path}: whatever it says, the same is started")


@pytest.mark.parametrize("path", [*rows_with("listed"), *rows_with("not needed")])
def test_what_is_listed_or_not_needed_changes_nothing(
    planned: Planned, bases: tuple[Manifest, ...], path: str
) -> None:
    listed = any(row.local == "listed" for row in rows() if row.covers(path))
    tried = 0
    for base in bases:
        sections = with_sections(base, path)
        required = schemas()[path][1]
        before = planned(sections if required else with_value(sections, path, ...))
        given = [] if required else [with_value(sections, path, sample(path))]
        for after in (*given, *variants(sections, path)):
            made = planned(after)
            if made is not None and value_at(after, place(path)) not in (None, [], {}):
                tried += 1
                assert made == before
                assert is_listed(after, path) is listed
    assert tried
