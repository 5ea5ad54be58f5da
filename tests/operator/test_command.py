"""`tandem render`."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tandem.cli import render

from .endpoints import HERE, rendered

Run = Callable[..., tuple[int, str, str]]
S3 = HERE / "manifests/dpd-s3.yaml"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, stdout, stderr) of the command in this process."""

    def command(*words: object) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        render.add_arguments(parser)
        code = render.run(parser.parse_args([str(w) for w in words]))
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_it_prints_every_object(run: Run) -> None:
    code, out, err = run("-f", S3)
    assert (code, err) == (0, "")
    assert [d["kind"] for d in yaml.safe_load_all(out) if d] == [
        o["kind"] for o in rendered("dpd-s3").objects
    ]
    assert out.startswith("# Endpoint team-a/pd-s3, rendered from dpd-s3.yaml\n# connector: LMCache")


def test_sizes_are_explained_in_comments(run: Run) -> None:
    _, out, _ = run("-f", S3)
    for said in ("PD_BUFFER_SIZE: 8,589,934,592 bytes", "EFA: 32 interfaces", "shm: 10Gi", "grace: "):
        assert any(line.startswith("#") and said in line for line in out.splitlines())


def test_as_json_it_is_a_list(run: Run) -> None:
    code, out, err = run("-f", S3, "--json")
    assert code == 0
    assert json.loads(out) == {"apiVersion": "v1", "kind": "List", "items": json.loads(out)["items"]}
    assert "connector: LMCache" in err


def test_images_and_namespaces_are_settings(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text(S3.read_text("utf-8").replace("  namespace: team-a\n", ""))
    flags = ("--router-image", "r:1", "--proxy-image", "p:1", "--collector-image", "c:1")
    _, out, _ = run("-f", file, "-n", "team-z", "--system-namespace", "serving", *flags)
    objects = [d for d in yaml.safe_load_all(out) if d]
    assert {o["metadata"].get("namespace") for o in objects} == {"team-z", "serving", None}
    images = {
        c["image"]
        for o in objects
        if o["kind"] == "Deployment"
        for c in o["spec"]["template"]["spec"]["containers"]
    }
    assert {"r:1", "p:1", "c:1"} < images


def test_a_manifests_own_namespace_counts_and_that_is_told(run: Run) -> None:
    _, out, err = run("-f", S3, "-n", "team-z")
    assert "namespace: team-z" not in out
    assert err == "tandem: --namespace team-z: not used, as the manifest says namespace: team-a\n"
    assert run("-f", S3, "-n", "team-a")[2] == ""


def test_the_manifest_may_come_by_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = S3.read_text("utf-8")
    for given, code, told in (
        (text, 0, ""),
        (text.replace("routingThreshold", "routingTreshold"), 2, "tandem: <stdin>:"),
        ("\xff", 2, "tandem: standard input: is not UTF-8 text"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode("latin-1"))))
        done, out, err = run("-f", "-")
        assert (done, bool(out)) == (code, code == 0)
        assert err.startswith(told)
        assert code or out.startswith("# Endpoint team-a/pd-s3, rendered from <stdin>\n")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--namespace", "Team Z"),
        ("--system-namespace", "x_y"),
        ("--router-image", ""),
        ("--proxy-image", "nginx 1"),
        ("--collector-image", "https://otel/collector"),
        ("--region", "US East"),
        ("--remote-write-url", "prometheus:9090"),
    ],
)
def test_a_setting_that_could_not_be_applied_is_refused(
    capsys: pytest.CaptureFixture[str], run: Run, flag: str, value: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run("-f", S3, flag, value)
    assert end.value.code == 2
    assert f"{flag}: {value!r} is no " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--namespace", "--system-namespace"])
def test_a_namespace_that_cannot_be_is_refused(
    run: Run, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Team", "a.b", "", "a\n---\n", "a" * 64):
        with pytest.raises(SystemExit) as ended:
            run("-f", S3, flag, name)
        assert ended.value.code == 2
        assert f"{name!r} is no namespace's name" in capsys.readouterr().err


def test_the_models_config_sizes_the_buffer(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 10, "num_key_value_heads": 8, "head_dim": 128}')
    _, out, _ = run("-f", S3, "--model-config", config)
    chunks = (8 << 30) // (2 * 10 * 128 * 2 * 256)
    assert f"'{chunks}'" in out


def test_what_validate_calls_an_error_is_not_rendered(run: Run, tmp_path: Path) -> None:
    """All of it, also what only Kubernetes or vLLM would refuse."""
    file = tmp_path / "endpoint.yaml"
    text = S3.read_text("utf-8").replace("containerPort: 8000", "containerPort: 8081")
    file.write_text(text.replace("image: ", "image: not an "))
    code, out, err = run("-f", file)
    assert (code, out) == (2, "")
    told = err.splitlines()
    for path, line in (("image", "image: "), ("modelInvocationPort.containerPort", "containerPort: ")):
        number = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if line in text)
        assert any(t.startswith(f"tandem: {file}:{number}:") and f" spec.worker.{path}: " in t for t in told)


def test_a_namespace_without_a_value_is_none(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text(S3.read_text("utf-8").replace("namespace: team-a", "namespace: null"))
    code, out, _ = run("-f", file, "-n", "team-b", "--json")
    assert code == 0
    namespaces = {o["metadata"].get("namespace") for o in json.loads(out)["items"]}
    assert "team-b" in namespaces
    assert "default" not in namespaces


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: InferenceEndpointConfig\n", "apiVersion"),
        ("a: [", ".yaml:1:5: error IEC001"),
        (
            S3.read_text("utf-8").replace("containerPort: 8000", "containerPort: 9113"),
            "containerPort: is 9113",
        ),
    ],
)
def test_a_resource_that_is_wrong_is_told_and_has_its_code(
    run: Run, text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text(text)
    code, out, err = run("-f", file)
    assert (code, out) == (2, "")
    assert said in err
    assert str(file) in err


def test_a_file_that_is_not_there_has_its_own_code(run: Run, tmp_path: Path) -> None:
    assert run("-f", tmp_path / "none.yaml")[0] == 3
    assert run("-f", S3, "--model-config", tmp_path / "none.json")[0] == 3


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, f'{{"a": {" " * (4 << 20)}1}}'])
def test_a_config_that_is_none_is_told(run: Run, text: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    code, _, err = run("-f", S3, "--model-config", config)
    assert code == 2
    assert str(config) in err


def test_no_text_of_the_resource_gets_out_of_a_comment(run: Run, tmp_path: Path) -> None:
    """What is printed is applied: a line that a note ends with would be an object of its own."""
    forged = "x\\n---\\napiVersion: v1\\nkind: Secret\\nmetadata: {name: x}\\u2028kind: Secret\\r\\e[31m"
    text = S3.read_text("utf-8").replace('"--model"', f'"--tokenizer", "{forged}", "--model"')
    file = tmp_path / "a\nkind: Secret\n#.yaml"
    file.write_text(text, "utf-8")
    code, out, err = run("-f", file)
    assert (code, err) == (0, "")
    assert "--tokenizer x" in out.partition("---\n")[0]
    assert {d["kind"] for d in yaml.safe_load_all(out) if d} == {
        o["kind"] for o in rendered("dpd-s3").objects
    }
    _, _, err = run("-f", file, "--json")
    assert all(line.startswith("tandem: ") for line in err.splitlines())
    assert "\x1b" not in err
