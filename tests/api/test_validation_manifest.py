"""Files as people write them: YAML in every form, JSON, lists, and what cannot be read."""

from __future__ import annotations

import json

import pytest
import yaml

from tandem.api.validation import Position, read_manifest
from tandem.api.validation.manifest import Manifest

from .manifests import MANIFESTS, NVME, S3


def read(text: str) -> Manifest:
    return read_manifest(text, "x.yaml")


def wrong(text: str) -> list[tuple[str, str, Position | None]]:
    return [(f.rule, f.message, f.position) for f in read(text).findings]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_read_as_it_stands(name: str) -> None:
    (document,) = read(MANIFESTS[name]).documents
    assert document.resource == yaml.safe_load(MANIFESTS[name])
    assert document.name == document.resource["metadata"]["name"]


def test_each_part_has_its_place() -> None:
    (document,) = read(S3).documents
    lines = document.lines
    assert lines[()] == Position("x.yaml", 1, 1)
    assert lines["spec", "pdSpec", "routingThreshold"] == Position("x.yaml", 22, 5)
    assert lines["spec", "worker", "args", 1] == Position("x.yaml", 39, 23)
    assert lines["spec", "worker", "environmentVariables", 1, "name"] == Position("x.yaml", 47, 10)


def test_an_alias_is_placed_where_its_anchor_stands() -> None:
    text = "kind: InferenceEndpointConfig\na: &x\n  b: 1\nc: *x\nd:\n  <<: *x\n  e: 2\n"
    (document,) = read(text).documents
    assert document.resource == {
        "kind": "InferenceEndpointConfig", "a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}
    }  # fmt: skip
    assert document.lines["c",].line == 4
    assert document.lines["c", "b"].line == 3
    assert document.lines["d", "b"].line == 3
    assert document.lines["d", "e"].line == 7


def test_the_objects_of_several_documents_and_of_a_list_are_found() -> None:
    inner = NVME.rstrip("\n").replace("\n", "\n    ")
    text = f"{S3}---\n# nothing\n---\napiVersion: v1\nkind: List\nitems:\n  - {inner}\n  - kind: Pod\n"
    manifest = read(text)
    assert [d.name for d in manifest.documents] == ["pd-s3", "pd-nvme"]
    first = S3.count("\n") + 7
    assert manifest.documents[1].lines[()] == Position("x.yaml", first, 5)
    assert manifest.documents[1].lines["metadata", "name"] == Position("x.yaml", first + 3, 7)
    assert manifest.notes == [f"x.yaml:{text.count(chr(10))}:5: a Pod is not looked at"]
    assert manifest.findings == []


def test_what_is_no_endpoint_is_noted() -> None:
    manifest = read("kind: Pod\n---\njust text\n---\n{a: 1}\n---\n")
    assert manifest.documents == []
    assert manifest.notes == [
        "x.yaml:1:1: a Pod is not looked at",
        "x.yaml:3:1: an object without kind is not looked at",
        "x.yaml:5:1: an object without kind is not looked at",
    ]


@pytest.mark.parametrize(
    "kind", ["inferenceEndpointConfig", "InferenceEndpointConfigs", "InferenceEndPointConfig"]
)
def test_a_kind_that_is_almost_right_is_a_mistake(kind: str) -> None:
    text = NVME.replace("kind: InferenceEndpointConfig", f"kind: {kind}")
    assert wrong(text) == [
        ("IEC004", f"is {kind!r}; write InferenceEndpointConfig", Position("x.yaml", 2, 1))
    ]


def test_an_object_of_the_group_without_a_kind_is_a_mistake() -> None:
    (found,) = wrong(NVME.replace("kind: InferenceEndpointConfig\n", ""))
    assert found == ("IEC004", "is required; write InferenceEndpointConfig", Position("x.yaml", 1, 1))


def test_json_is_read_with_places_tabs_and_all() -> None:
    resource = yaml.safe_load(NVME)
    resource["metadata"]["annotations"] = {"path": "a/b", "smile": '\U0001f600 \\ " é'}
    for ascii_only in (True, False):
        text = json.dumps(resource, indent="\t", ensure_ascii=ascii_only).replace("a/b", "a\\/b")
        (document,) = read(text).documents
        assert document.resource == resource
        assert document.lines["metadata", "name"] == Position("x.yaml", 5, 3)


def test_a_byte_order_mark_is_passed_over() -> None:
    (document,) = read("\ufeff" + NVME).documents
    assert document.lines[()] == Position("x.yaml", 1, 1)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("y", True), ("Off", False), ("yes", True), ("N", False), ("'y'", "y"),
        ("017", 15), ("0o17", 15), ("0x1F", 31), ("0b11", 3), ("1_000", 1000), ("08", 8.0), ("+12", 12),
        ("1e3", 1000.0), ("1.", 1.0), (".5", 0.5), ("1.2.3", "1.2.3"),
        ("1_0.5", 10.5), ("+_1", 1), ("0x_", "0x_"), ("1e999", "1e999"), ("<<", "<<"),
        ("10:30", "10:30"), ("2024-01-31", "2024-01-31"), ("~", None), ("", None), ("!!str 1", "1"),
        ("!!binary aGVsbG8=", "hello"), ("!!timestamp 2024-01-31", "2024-01-31"), ("=", "="),
    ],
)  # fmt: skip
def test_plain_scalars_are_read_as_kubectl_reads_them(scalar: str, value: object) -> None:
    """Seen with kubectl: y is a boolean, 1e3 a number, 10:30 text."""
    read_value = value_of(scalar)
    assert (read_value, type(read_value)) == (value, type(value))


def value_of(text: str) -> object:
    """What a manifest holds with this text as the value of a field."""
    manifest = read(f"kind: InferenceEndpointConfig\na: {text}\n")
    assert manifest.findings == []
    return manifest.documents[0].resource["a"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\tb", "b"),
        ("b\t# c", "b"),
        ("b\tc", "b\tc"),
        ("b\t\n  \n  c", "b\nc"),
        ("[b\t,\tc]", ["b", "c"]),
        ("{b:\tc}", {"b": "c"}),
        ("\n  b:\tc\t\n  d: 1\t", {"b": "c", "d": 1}),
        ("[&x b, *x, &x c, *x]", ["b", "b", "c", "c"]),
        ("{b:}", {"b:": None}),
        ("[b:, c: d]", ["b:", {"c": "d"}]),
        ("{1e3: b, 1.5: c}", {"1000": "b", "1.5": "c"}),
        ("{<<: {b: 1, c: 2}, b: 3}", {"b": 3, "c": 2}),
        ("{<<: [{b: 1}, {b: 2, c: 3}]}", {"b": 1, "c": 3}),
        ("{<<: {b: 1}, <<: {b: 2}}", {"b": 2}),
        ("{<<: {<<: {b: 1}, b: 2}}", {"b": 2}),
    ],
)
def test_what_other_readers_of_yaml_read_otherwise_is_read_as_kubectl_reads_it(
    text: str, value: object
) -> None:
    assert value_of(text) == value


def test_a_key_that_a_merge_after_it_replaces_is_given_twice() -> None:
    """In YAML a key's own value would count; with kubectl the later one does."""
    manifest = read("kind: InferenceEndpointConfig\na: &a {b: 1}\nc:\n  b: 2\n  <<: *a\n")
    assert manifest.documents[0].resource["c"] == {"b": 1}
    ((rule, message, position),) = [(f.rule, f.message, f.position) for f in manifest.findings]
    assert (rule, position) == ("IEC002", Position("x.yaml", 5, 3))
    assert message.startswith("'b' is given twice")


def test_keys_are_text_as_in_json() -> None:
    (document,) = read("kind: InferenceEndpointConfig\na: {1: b, true: c, x: d}\n").documents
    assert document.resource["a"] == {"1": "b", "true": "c", "x": "d"}
    assert document.lines["a", "1"] == Position("x.yaml", 2, 5)


def test_all_keys_that_are_given_twice_are_told() -> None:
    text = NVME.replace("    routingThreshold: 0\n", "    routingThreshold: 0\n    routingThreshold: 9\n")
    text = text.replace("  name: pd-nvme\n", "  name: pd-nvme\n  name: pd\n")
    lines = text.splitlines()
    assert wrong(text) == [
        (
            "IEC002",
            f"{key!r} is given twice; kubectl takes the last one without a word",
            Position("x.yaml", lines.index(line) + 1, column),
        )
        for key, line, column in (
            ("name", "  name: pd", 3),
            ("routingThreshold", "    routingThreshold: 9", 5),
        )
    ]
    assert read(text).documents[0].name == "pd", "and it is judged as the API server would get it"


@pytest.mark.parametrize(
    ("text", "line", "column", "said"),
    [
        ("spec:\n  a: [1,\n", 3, 1, "found '<stream end>'; the text ends before all is closed"),
        ("spec:\n\tworker: 1\n", 2, 1, "cannot start any token; it is a tab"),
        ("spec:\n  a: 1\n   b: 2\n", 3, 5, "here; a ':' ends a key here: look for a wrong indentation"),
        ("a:\n    b: 1\n  c: 2\n", 3, 3, "does not go on with the block that begins in line 1: look for"),
        ("a:1\nb: 2\n", 2, 2, "a missing space after a ':' in the line before"),
        ("a: {{ .Values.a }}\n", 1, 5, "a key must be a name; if {{ }} is a template's, render that first"),
        ("a: 1\n...\nb: 2\n", 3, 1, "begin another document with ---"),
        ("%YAML 1.2\n---\na: 1\n", 3, 1, "kubectl reads YAML 1.1 alone"),
        ("a: &x 1\nb: *y\n", 2, 4, "found undefined alias 'y'"),
        ("a: &x [*x]\n", 1, 4, "an anchor's value contains itself"),
        ("spec:\n  ? [a]\n  : 1\n", 2, 5, "a key must be a name"),
        ("a: 1\nb: \x00\n", 2, 4, "has the character U+0000, which YAML does not allow"),
        ("a: .inf\n", 1, 4, ".inf is not a number that JSON has"),
        ("a: !!int x\n", 1, 4, "'x' is not what its tag says, int"),
        ("a: !!int ''\n", 1, 4, "'' is not what its tag says, int"),
        ("a: !!float '-'\n", 1, 4, "'-' is not what its tag says, float"),
        ("a: !!bool 1\n", 1, 4, "'1' is not what its tag says, bool"),
        ("a: !!null b\n", 1, 4, "'b' is not what its tag says, null"),
        ("a: !!binary '!'\n", 1, 4, "Only base64 data is allowed"),
        ('a: "\\U00110000"\n', 1, 5, "found an escape of a character that there is not"),
        ('a: "\\UFFFFFFFF"\n', 1, 5, "found an escape of a character that there is not"),
        ("a: {18446744073709551615: 1}\n", 1, 5, "a key must be a name"),
        ("a: 1\n--- {b: 1}\n", 2, 1, "--- must stand alone on its line"),
        ("a: !mine {b: 1}\n", 1, 4, "the tag !mine is not known"),
        ("a: !mine b\n", 1, 4, "could not determine a constructor for the tag '!mine'"),
        ("<<: 1\n", 1, 5, "expected an object, or a list of objects, to merge"),
        ("[" * 5000, 1, 1, "is nested too deeply"),
        ('{"kind": "InferenceEndpointConfig"} {}', 1, 37, "expected '<document start>'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_with_its_place(text: str, line: int, column: int, said: str) -> None:
    ((rule, message, position),) = wrong(text)
    assert (rule, position) == ("IEC001", Position("x.yaml", line, column))
    assert said in message
    assert "\n" not in message


def test_what_stands_before_a_mistake_is_judged() -> None:
    manifest = read(f"{NVME}---\na: [\n")
    assert [d.name for d in manifest.documents] == ["pd-nvme"]
    assert [f.rule for f in manifest.findings] == ["IEC001"]


def test_aliases_that_would_fill_the_memory_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for i in range(1, 9):
        bomb += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n"
    ((rule, message, _),) = wrong(bomb)
    assert (rule, message) == ("IEC001", "holds more than 1,000,000 values, with what aliases repeat")


def test_a_file_may_be_large() -> None:
    text = "kind: InferenceEndpointConfig\na: [" + ", ".join(["x"] * 2000) + "]\n"
    assert read(text).findings == []
