"""What is rendered of the manifests, whole. A change shows up here as a reader of it would see it."""

from __future__ import annotations

import pytest
import yaml

from tandem.operator import document

from .endpoints import HERE, NAMES, VARIANTS, rendered


@pytest.mark.table
@pytest.mark.parametrize("name", NAMES)
def test_the_rendered_objects_are_those_of_the_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    golden = HERE / f"golden/{name}.yaml"
    text = document(rendered(name), f"Rendered from {name}.yaml")
    if request.config.getoption("--write-docs"):
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8"), "after a change that is meant: `make tables`, and read the diff"


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_file_holds_the_objects(name: str) -> None:
    """Comments, blocks and quotes lose nothing."""
    documents = [d for d in yaml.safe_load_all((HERE / f"golden/{name}.yaml").read_text("utf-8")) if d]
    assert documents == list(rendered(name).objects)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rendering_is_the_same_each_time(variant: str) -> None:
    assert rendered(*VARIANTS[variant]) == rendered(*VARIANTS[variant])
