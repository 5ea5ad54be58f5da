"""Both versions on a real API server, and conversion between them by our own functions."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.api.conversion import ANNOTATION_V1_FIELDS, convert_review
from tandem.api.crd import NAME, crd
from tandem.api.models import GROUP

from .conftest import ApiServer, resource, with_fields
from .manifests import S3

OLDER = f"inferenceendpointconfigs.v1alpha1.{GROUP}"


OLD_MANIFEST = """
apiVersion: inference.sagemaker.aws.amazon.com/v1alpha1
kind: InferenceEndpointConfig
metadata: {name: old}
spec:
  modelName: m
  instanceType: ml.g5.xlarge
  modelSourceConfig: {modelSourceType: s3, s3Storage: {bucketName: b, region: r}}
  worker:
    image: i
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: w}
    resources: {}
"""


def test_both_versions_are_served(api_server: ApiServer, namespace: str) -> None:
    api_server.get("create", "-f", "-", stdin=resource(OLD_MANIFEST, namespace))
    for version in ("v1", "v1alpha1"):
        found = api_server.get("get", f"inferenceendpointconfigs.{version}.{GROUP}", "-n", namespace, "old")
        assert found["apiVersion"] == f"{GROUP}/{version}"
    assert api_server.get("get", "crd", NAME)["status"]["storedVersions"] == ["v1"]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"spec.instanceType": ...}, "spec.instanceType: Required value"),
        ({"spec.pdSpec": {"prefillSpec": {}, "decodingSpec": {}}}, 'unknown field "spec.pdSpec"'),
        ({"spec.modelSourceConfig.modelSourceType": "huggingface"}, 'supported values: "fsx", "s3"'),
        ({"spec.modelSourceConfig.s3Storage": ...}, "s3Storage is required when modelSourceType is s3"),
    ],
)
def test_the_older_version_refuses_what_it_has_not(
    api_server: ApiServer, changes: dict[str, Any], refusal: str
) -> None:
    assert refusal in "\n".join(api_server.refusals(with_fields(OLD_MANIFEST, changes)))


@pytest.fixture
def converting(api_server: ApiServer, tmp_path: Path) -> Iterator[ApiServer]:
    """The API server, asking our own functions for conversion, over HTTPS as it must."""
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    request = "openssl req -x509 -newkey rsa:2048 -noenc -days 1 -subj /CN=tandem"
    request += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(request.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Webhook)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"https://127.0.0.1:{server.server_address[1]}/convert"
    authority = base64.b64encode(certificate.read_bytes()).decode()
    try:
        api_server.install(crd({"url": url, "caBundle": authority}))
        yield api_server
    finally:
        api_server.install(crd())
        server.shutdown()
        thread.join()
        server.server_close()


class _Webhook(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(convert_review(review)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


def test_an_object_goes_through_the_older_version_and_loses_nothing(
    converting: ApiServer, namespace: str
) -> None:
    created = converting.get("create", "-f", "-", stdin=resource(S3, namespace))
    seen = converting.get("get", OLDER, "-n", namespace, "pd-s3")
    assert "pdSpec" not in seen["spec"]
    assert ANNOTATION_V1_FIELDS in seen["metadata"]["annotations"]
    seen["spec"]["worker"]["image"] = "vllm:new"
    converting.get("replace", "-f", "-", stdin=seen)
    after = converting.get("get", "iec", "-n", namespace, "pd-s3")
    assert after["spec"]["worker"].pop("image") == "vllm:new"
    del created["spec"]["worker"]["image"]
    assert after["spec"] == created["spec"]
    assert "annotations" not in after["metadata"]


def test_what_cannot_be_converted_is_refused_with_the_path(converting: ApiServer, namespace: str) -> None:
    wrong = resource(OLD_MANIFEST, namespace)
    fields_of_v1 = {
        "fields": {"spec.pdSpec": {"routingThreshold": -1, "prefillSpec": {}, "decodingSpec": {}}}
    }
    wrong["metadata"]["annotations"] = {ANNOTATION_V1_FIELDS: json.dumps(fields_of_v1)}
    done = converting.kubectl("create", "-f", "-", stdin=wrong)
    assert done.returncode != 0
    assert "spec.pdSpec.routingThreshold: must be at least 0 (it is -1)" in done.stderr
