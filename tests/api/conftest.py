"""A real API server for the whole session: kube-apiserver and etcd, without nodes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from tandem.api.crd import NAME, crd

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 90
KUBECTL_SECONDS = 120
"""Most that a command takes: one that waits for what does not come is a failure, not a test that hangs."""
TOKEN = "test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for the API server waits until it is there."""
    for item in items:
        if "api_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(START_SECONDS + 180))


@dataclass(frozen=True)
class ApiServer:
    kubectl_path: Path
    kubeconfig: Path
    away: Callable[[], AbstractContextManager[None]]
    """A block in which the API server does not run; after it another one does, at the same address."""

    def kubectl(self, *words: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; `stdin` is text, or an object that is given as JSON."""
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        argv = [str(self.kubectl_path), f"--kubeconfig={self.kubeconfig}", *words]
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, check=False, timeout=KUBECTL_SECONDS
        )

    def get(self, *words: str, stdin: Any = None) -> Any:
        """The object that kubectl prints."""
        done = self.kubectl(*words, "-o", "json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def raw(self, path: str) -> Any:
        done = self.kubectl("get", "--raw", path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def install(self, definition: dict[str, Any]) -> None:
        """Apply a CustomResourceDefinition and wait until it is served."""
        done = self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=definition)
        assert done.returncode == 0, done.stderr
        self.wait_until_served(NAME)

    def wait_until_served(self, name: str) -> None:
        """Wait for a definition that was applied. `kubectl wait` fails on one that has no conditions yet."""
        deadline = time.monotonic() + 60
        while True:
            conditions = self.get("get", "crd", name).get("status", {}).get("conditions") or []
            if {"Established": "True"}.items() <= {c["type"]: c["status"] for c in conditions}.items():
                return
            assert time.monotonic() < deadline, f"{name} is not served: {conditions}"
            time.sleep(0.1)

    def refusals(self, resource: dict[str, Any]) -> list[str]:
        """What the API server says against creating an object; nothing when it would take it."""
        done = self.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=resource)
        return [] if done.returncode == 0 else done.stderr.splitlines()


@pytest.fixture(scope="session")
def bare_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server as it comes, without Tandem's resource."""
    with started(_assets(), tmp_path_factory.mktemp("kube")) as server:
        yield server


@pytest.fixture(scope="session")
def api_server(bare_api_server: ApiServer) -> ApiServer:
    """An API server that serves InferenceEndpointConfig."""
    bare_api_server.install(crd())
    return bare_api_server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A namespace of the test's own."""
    return new_namespace(api_server)


def new_namespace(server: ApiServer) -> str:
    name = f"test-{uuid.uuid4().hex[:10]}"
    done = server.kubectl("create", "namespace", name)
    assert done.returncode == 0, done.stderr
    return name


def assets_folder() -> Path:
    """Where programs of Kubernetes are; it need not be there."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    beside = REPOSITORY.parent / "shared/kube/cluster"
    if not named and beside.exists():
        done = subprocess.run([beside, "assets"], capture_output=True, text=True, check=True)
        named = done.stdout.strip()
    return Path(named or "/none")


def lacking(what: str) -> NoReturn:
    """Skip the test; in CI it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def _assets() -> Path:
    """The folder with kube-apiserver, etcd and kubectl."""
    folder = assets_folder()
    if not (folder / "kube-apiserver").exists() or not shutil.which("openssl"):
        lacking(
            "needs openssl, kube-apiserver, etcd and kubectl: set KUBEBUILDER_ASSETS to the folder that has "
            "the last three, as printed by `setup-envtest use -p path`"
        )
    return folder


@contextmanager
def started(assets: Path, folder: Path) -> Iterator[ApiServer]:
    """Start etcd and the API server in a folder, on free ports; both are ended at the end."""
    etcd, peers, secure = _free_ports(3)
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], capture_output=True, check=True)
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(secure, folder / "certs/apiserver.crt")))
    store = [
        "etcd",
        f"--data-dir={folder}/etcd",
        "--unsafe-no-fsync",
        "--log-level=error",
        f"--listen-client-urls=http://127.0.0.1:{etcd}",
        f"--advertise-client-urls=http://127.0.0.1:{etcd}",
        f"--listen-peer-urls=http://127.0.0.1:{peers}",
    ]
    api = [
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={secure}",
        f"--cert-dir={folder}/certs",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        # There are no controllers, so no namespace gets its default service account.
        "--disable-admission-plugins=ServiceAccount",
    ]
    log = folder / "kube-apiserver.log"
    with _process(assets, store, folder / "etcd.log"), ExitStack() as ended:

        def start() -> None:
            ended.enter_context(_process(assets, api, log))
            end = time.monotonic() + START_SECONDS
            while server.kubectl("get", "--raw", "/readyz").returncode != 0:
                said = log.read_text("utf-8", "replace")[-2000:]
                assert time.monotonic() < end, f"kube-apiserver did not become ready:\n{said}"
                time.sleep(0.2)

        @contextmanager
        def away() -> Iterator[None]:
            ended.close()
            yield
            start()

        server = ApiServer(assets / "kubectl", kubeconfig, away)
        start()
        yield server


@contextmanager
def _process(assets: Path, argv: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen([assets / argv[0], *argv[1:]], stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


def _kubeconfig(port: int, certificate: Path) -> dict[str, Any]:
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(certificate)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }


def resource(text: str, namespace: str = "default") -> dict[str, Any]:
    """A manifest in a namespace."""
    loaded: dict[str, Any] = yaml.safe_load(text)
    loaded["metadata"]["namespace"] = namespace
    return loaded


def with_fields(text: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A manifest with fields set by path (`spec.worker.args`); ... takes one away."""
    loaded = resource(text)
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = loaded
        for section in sections:
            place = place.setdefault(section, {})
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return loaded
