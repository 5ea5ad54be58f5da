"""`tandem validate` as people and tools run it."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.api.validation import RULES, Finding, Position, Report, formats
from tandem.cli import FAILURE, OK, USAGE, main

from .manifests import COLOCATED, NVME, S3

WRONG = NVME.replace("routingThreshold: 0", "routingThreshold: -1")
LINE = WRONG.splitlines().index("    routingThreshold: -1") + 1
GOOD = NVME.replace('resources: {limits: {nvidia.com/gpu: "8"}}\n', "resources: {}\n")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`tandem validate ARGUMENTS…` in a folder of its own: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def validate(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["validate", *arguments])
        except SystemExit as end:  # argparse's way
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return validate


def write(**files: str) -> None:
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text, "utf-8")


def test_a_good_manifest_passes_in_silence(run: Run) -> None:
    write(good=GOOD)
    assert run("-f", "good.yaml") == (OK, "", "1 endpoint: 0 errors, 0 warnings\n")


def test_a_bad_one_is_told_line_by_line(run: Run) -> None:
    write(bad=WRONG)
    code, out, err = run("-f", "bad.yaml")
    assert code == FAILURE
    assert out.splitlines()[0] == (
        f"bad.yaml:{LINE}:5: error IEC104 spec.pdSpec.routingThreshold: must be at least 0 (it is -1)"
    )
    assert err == "1 endpoint: 1 error, 1 warning\n"


def test_warnings_fail_only_where_that_is_asked_for(run: Run) -> None:
    write(warned=NVME)
    assert run("-f", "warned.yaml")[0] == OK
    code, out, err = run("-f", "warned.yaml", "--strict")
    assert (code, err) == (FAILURE, "1 endpoint: 0 errors, 1 warning\n")
    assert ": warning IEC501 spec.worker.resources: " in out


def test_several_files_folders_and_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder/below.yaml").mkdir(parents=True)
    for name in ("b.yml", "a.json", "c.yaml", "notes.txt"):
        Path("folder", name).write_text(WRONG if name != "a.json" else json.dumps({"kind": "Pod"}), "utf-8")
    write(one=WRONG)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{S3}---\n{COLOCATED}".encode())))
    code, out, err = run("-f", "one.yaml", "folder", "-f", "-")
    assert code == FAILURE
    files = list(dict.fromkeys(line.partition(":")[0] for line in out.splitlines()))
    assert files == ["one.yaml", "folder/b.yml", "folder/c.yaml", "<stdin>"]
    assert err.splitlines() == [
        "note: folder/a.json:1:1: a Pod is not looked at",
        "note: folder/below.yaml: a folder of a folder is not looked into; name it too",
        "5 endpoints: 3 errors, 7 warnings",
    ]


@pytest.mark.parametrize("text", ["", "kind: Pod\n", "# nothing\n---\n"])
def test_no_endpoint_at_all_is_an_error(run: Run, text: str) -> None:
    write(other=text)
    code, out, _ = run("-f", "other.yaml")
    assert code == FAILURE
    assert out == "other.yaml:1:1: error IEC003 no object of kind InferenceEndpointConfig in other.yaml\n"
    Path("empty").mkdir()
    code, out, _ = run("-f", "other.yaml", "empty")
    assert (code, out) == (
        FAILURE,
        "error IEC003 no object of kind InferenceEndpointConfig in other.yaml, empty\n",
    )


def test_folders_of_folders_are_noted_unless_they_are_named(run: Run) -> None:
    """As by kubectl they are not looked into; `sub.yaml` is a folder with a misleading name."""
    for name in ("folder", "folder/sub.yaml", "folder/.git"):
        Path(name).mkdir()
    Path("folder/one.yaml").write_text(GOOD)
    Path("folder/sub.yaml/two.yaml").write_text(GOOD)
    note = "note: folder/sub.yaml: a folder of a folder is not looked into; name it too\n"
    assert run("-f", "folder") == (OK, "", f"{note}1 endpoint: 0 errors, 0 warnings\n")
    assert run("-f", "folder", "folder/sub.yaml") == (OK, "", "2 endpoints: 0 errors, 0 warnings\n")


def test_standard_input_without_an_endpoint_has_its_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"kind: Pod\n")))
    _, out, _ = run("-f", "-")
    assert out == "<stdin>:1:1: error IEC003 no object of kind InferenceEndpointConfig in <stdin>\n"


def test_a_file_that_fails_while_it_is_read_is_named(run: Run) -> None:
    """Linux opens it, and there is nothing at address 0."""
    assert run("-f", "/proc/self/mem") == (USAGE, "", "tandem: /proc/self/mem: Input/output error\n")


def test_what_is_no_yaml_is_an_error_and_not_that_nothing_is_there(run: Run) -> None:
    write(broken="a: [\n")
    code, out, _ = run("-f", "broken.yaml")
    assert code == FAILURE
    assert [line.split()[2] for line in out.splitlines()] == ["IEC001"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-f", "none.yaml"], "tandem: none.yaml: No such file or directory\n"),
        (["-f", "bytes.yaml"], "tandem: bytes.yaml: is not UTF-8 text: invalid start byte at byte 3\n"),
        (["-f", "good.yaml", "--model-config", "none"], "tandem: none: No such file or directory\n"),
        (["-f", "good.yaml", "--model-config", "good.yaml"], "tandem: good.yaml: is not JSON: "),
        (["-f", "good.yaml", "--model-config", "list.json"], "it holds no object\n"),
        (
            ["-f", "good.yaml", "--model-config", "deep.json"],
            "deep.json: is not JSON that can be read: it is nested",
        ),
        (
            ["-f", "good.yaml", "--model-config", "/dev/zero"],
            "/dev/zero: is larger than 4 MiB; no config.json is\n",
        ),
        (["-f", ""], "tandem: -f: names no file\n"),
        (["-f", "folder"], "tandem: folder/x\\n::error::forged.yaml: No such file or directory\n"),
        ([], "the following arguments are required: -f/--file"),
        (["-f", "good.yaml", "--format", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_what_cannot_be_run_is_the_callers_mistake(run: Run, arguments: list[str], said: str) -> None:
    write(good=GOOD)
    Path("bytes.yaml").write_bytes(b"a: \xff")
    Path("list.json").write_text("[]")
    Path("deep.json").write_text("[" * 100_000)
    Path("folder").mkdir()
    Path("folder/x\n::error::forged.yaml").symlink_to("nowhere")
    code, out, err = run(*arguments)
    assert (code, out) == (USAGE, "")
    assert said in err


def test_the_models_config_is_read(run: Run) -> None:
    config = {"num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    Path("config.json").write_text(json.dumps(config))
    args = '"--tensor-parallel-size", "8"'
    write(buffer=S3.replace(args, f'{args}, "--max-model-len", "1000000"'))
    assert "IEC707" in run("-f", "buffer.yaml")[1]
    assert "IEC707" not in run("-f", "buffer.yaml", "--model-config", "config.json")[1]


def test_json_has_everything(run: Run) -> None:
    write(bad=f"{WRONG}---\nkind: Pod\n")
    for flags in (["--json"], ["--format", "json"]):
        code, out, _ = run("-f", "bad.yaml", *flags)
        printed = json.loads(out)
        assert code == FAILURE
        assert (printed["endpoints"], printed["errors"], printed["warnings"]) == (1, 1, 1)
        assert printed["findings"][0] == {
            "rule": "IEC104",
            "severity": "error",
            "path": "spec.pdSpec.routingThreshold",
            "message": "must be at least 0 (it is -1)",
            "file": "bad.yaml",
            "line": LINE,
            "column": 5,
        }
        assert printed["notes"] == [f"bad.yaml:{WRONG.count(chr(10)) + 2}:1: a Pod is not looked at"]


def test_github_shows_findings_beside_the_lines(run: Run) -> None:
    write(bad=WRONG)
    code, out, _ = run("-f", "bad.yaml", "--format", "github")
    assert code == FAILURE
    assert out.splitlines()[0] == (
        f"::error file=bad.yaml,line={LINE},col=5,title=IEC104%3A The value is outside of what the "
        f"field allows"
        "::spec.pdSpec.routingThreshold: must be at least 0 (it is -1)"
    )


def test_what_github_would_read_as_its_own_is_escaped() -> None:
    report = Report((Finding("IEC104", "a", "is 5%,\nor: less", Position("a,b:c%.yaml", 1, 2)),))
    assert formats.github(report) == (
        "::error file=a%2Cb%3Ac%25.yaml,line=1,col=2,title=IEC104%3A The value is outside of what the "
        "field allows"
        "::a: is 5%25,\\nor: less\n"
    )


def test_sarif_is_what_code_scanning_takes(run: Run) -> None:
    write(**{"bad one": WRONG})
    code, out, _ = run("-f", "bad one.yaml", "--format", "sarif")
    assert code == FAILURE
    log = json.loads(out)
    matches(log, SARIF)
    (analysis,) = log["runs"]
    rules = analysis["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    first, second = analysis["results"]
    assert (first["ruleId"], first["level"], second["level"]) == ("IEC104", "error", "warning")
    for result in (first, second):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    (location,) = first["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "bad%20one.yaml"},
        "region": {"startLine": LINE, "startColumn": 5},
    }
    assert location["logicalLocations"] == [{"fullyQualifiedName": "spec.pdSpec.routingThreshold"}]


def test_a_file_may_have_any_name(run: Run) -> None:
    """Also one that is not UTF-8."""
    Path(os.fsdecode(b"\xff.yaml")).write_text(WRONG)
    for form in ("human", "json", "github", "sarif"):
        code, out, _ = run("-f", os.fsdecode(b"\xff.yaml"), "--format", form)
        assert code == FAILURE
        assert "routingThreshold" in out
    assert '"uri": "%FF.yaml"' in out


def test_sarif_of_nothing_is_a_run_without_results(run: Run) -> None:
    write(good=GOOD)
    code, out, _ = run("-f", "good.yaml", "--format", "sarif")
    log = json.loads(out)
    matches(log, SARIF)
    assert (code, log["runs"][0]["results"]) == (OK, [])


# The part of the SARIF 2.1.0 schema that is used: each object's properties, those marked ! required.
TEXT = {"text!": str}
SARIF: Any = {
    "$schema": re.compile(r"https://.*sarif.*2\.1\.0.*"),
    "version!": re.compile(r"2\.1\.0"),
    "runs!": [
        {
            "columnKind": re.compile(r"utf16CodeUnits|unicodeCodePoints"),
            "tool!": {
                "driver!": {
                    "name!": str,
                    "version": str,
                    "rules": [
                        {
                            "id!": str,
                            "shortDescription": TEXT,
                            "defaultConfiguration": {"level": re.compile("none|note|warning|error")},
                        }
                    ],
                }
            },
            "results": [
                {
                    "ruleId": str,
                    "ruleIndex": int,
                    "level": re.compile("none|note|warning|error"),
                    "message!": TEXT,
                    "locations": [
                        {
                            "physicalLocation": {
                                "artifactLocation": {"uri": re.compile(r"[^\s\\]+")},
                                "region": {"startLine": int, "startColumn": int},
                            },
                            "logicalLocations": [{"fullyQualifiedName": str}],
                        }
                    ],
                }
            ],
        }
    ],
}


def matches(value: Any, shape: Any) -> None:
    if isinstance(shape, dict):
        known = {name.removesuffix("!"): inner for name, inner in shape.items()}
        assert value.keys() <= known.keys()
        assert {name.removesuffix("!") for name in shape if name.endswith("!")} <= value.keys()
        for name, item in value.items():
            matches(item, known[name])
    elif isinstance(shape, list):
        assert isinstance(value, list)
        for item in value:
            matches(item, shape[0])
    elif isinstance(shape, re.Pattern):
        assert shape.fullmatch(value)
    else:
        assert isinstance(value, shape)
        assert not isinstance(value, int) or value >= 0


def test_whatever_a_manifest_holds_each_finding_is_one_line(run: Run) -> None:
    """Keys, values and kinds could else forge findings, or steer the terminal."""
    forged = r"a\n::error::x\nx.yaml:1:1: error IEC001 forged\u2028b\e[31m"
    other = f'apiVersion: v1\nkind: "{forged}"\n---\n'
    write(bad=other + WRONG.replace("spec:\n", f'spec:\n  "{forged}": 1\n  instanceTypes: ["{forged}"]\n', 1))
    for form, first in (("human", "bad.yaml:"), ("github", ("::error file=", "::warning file="))):
        code, out, err = run("-f", "bad.yaml", "--format", form)
        assert code == FAILURE
        assert len(out.splitlines()) >= 4
        assert all(line.startswith(first) for line in out.splitlines())
        assert [line.partition(":")[0] for line in err.splitlines()] == ["note", "1 endpoint"]
        assert "\x1b" not in out + err


def test_a_file_beyond_all_manifests_is_not_read(run: Run) -> None:
    write(large=f"{GOOD}# {'x' * (4 << 20)}\n")
    code, out, err = run("-f", "large.yaml")
    assert (code, out) == (USAGE, "")
    assert err == "tandem: large.yaml: is larger than 4 MiB; API servers take no object so large\n"
