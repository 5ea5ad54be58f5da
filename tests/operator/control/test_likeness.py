"""What counts as the same, as an API server gives objects back."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.operator.control.likeness import covers


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({"a": 1, "theirs": 2}, {"a": 1}),
        ({}, {"empty": {}, "none": None, "off": False, "zero": 0, "list": []}),
        ({"requests": {"cpu": "1", "memory": "1Gi"}}, {"requests": {"cpu": "1000m", "memory": "1024Mi"}}),
        ({"limits": {"nvidia.com/gpu": "8"}}, {"limits": {"nvidia.com/gpu": 8}}),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1024Mi"}}),
        ({"list": [{"name": "a", "defaulted": True}]}, {"list": [{"name": "a"}]}),
    ],
)
def test_what_an_api_server_adds_and_writes_otherwise_is_alike(live: Any, desired: Any) -> None:
    assert covers(live, desired)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ({}, {"a": 1}),
        ({"a": 2}, {"a": 1}),
        ({"a": {}}, {"a": "text"}),
        ({"a": "text"}, {"a": {}}),
        ({"a": "text"}, {"a": []}),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": "1"}}),
        ({"limits": {"cpu": "much"}}, {"limits": {"cpu": "1"}}),
        ({"value": "1000m"}, {"value": "1"}),
        ({"list": [1]}, {"list": [1, 2]}),
        ({"list": [1, 2]}, {"list": [1]}),
        ({"list": [2, 1]}, {"list": [1, 2]}),
    ],
)
def test_an_edit_is_not(live: Any, desired: Any) -> None:
    assert not covers(live, desired)
