"""A real cluster of two nodes on this machine, for as long as the tests last."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

import tandem

from .kube import Cluster

HERE = Path(__file__).parent
SCRIPT = HERE.parents[2] / "shared/kube/cluster"
"""Raises a cluster in namespaces of its own."""

PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "openssl": "openssl",
    "nginx": "nginx",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
"""What it takes, and the Debian package that has it."""

_STARTED_SECONDS = 30
_MANY = httpx.Limits(max_connections=None)

# The image's /usr/local lies over the machine's, in this mount namespace alone. The folders that it needs are
# bound in there rather than left where they are: a pod's volumes may hide them, as one at /tmp would.
_PREPARED = """
mount -t overlay tandem-tests -o "lowerdir=$1:/usr/local" /usr/local
mount --bind "$2" /usr/local/tandem/python
mount --bind "$3" /usr/local/tandem/site
mount --bind "$4" /usr/local/tandem/src
mount --bind "$5" /usr/local/tandem/kube
shift 5
exec "$@"
"""


def lack() -> str | None:
    """What this machine lacks for a cluster, and how to get it."""
    if not SCRIPT.exists() or sys.platform != "linux":
        return (
            "needs a Kubernetes cluster: name the kubeconfig of one in TANDEM_TEST_KUBECONFIG, and run the "
            "tests where its pods and services are reachable"
        )
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = sorted({package for p, package in PROGRAMS.items() if not shutil.which(p, path=path)})
    if missing:
        return f"needs packages: apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    return None


@contextmanager
def raised(nodes: int = 2) -> Iterator[Cluster]:
    """A cluster; whatever way this process ends, nothing of it is left."""
    with ExitStack() as ended:
        folder = Path(tempfile.mkdtemp(prefix="tandem-kube-"))
        at = ("--dir", str(folder / "cluster"))
        ended.enter_context(_taken_down(at, folder))
        assets = _done([sys.executable, str(SCRIPT), "assets"]).strip()
        image = _image(folder / "image")
        up = [
            *("unshare", "--mount", "--propagation", "private", "sh", "-ec", _PREPARED, "sh"),
            *map(str, (image, sys.base_prefix, sysconfig.get_path("purelib"), _sources(), assets)),
            *(sys.executable, str(SCRIPT), "up", *at, "--nodes", str(nodes)),
        ]
        try:
            _done(up)
        except AssertionError:  # seen once in dozens of times: a node's containerd or kubelet ended at once
            _done([sys.executable, str(SCRIPT), "down", *at])
            _done(up)
        enter = (sys.executable, str(SCRIPT), "run", *at, "--")
        relay = folder / "relay"
        ended.enter_context(_background([*enter, sys.executable, str(HERE / "relay.py"), str(relay)], relay))
        api = ended.enter_context(proxied_api(enter, dict(os.environ), folder / "api"))
        transport = httpx.HTTPTransport(uds=str(relay), limits=_MANY)
        http = ended.enter_context(httpx.Client(transport=transport, timeout=60, trust_env=False))

        def make_image(name: str, argv: Sequence[str]) -> None:
            _done([sys.executable, str(SCRIPT), "image", *at, name, "--", *argv])

        yield Cluster(enter, dict(os.environ), api, http, make_image)


@contextmanager
def given(kubeconfig: str) -> Iterator[Cluster]:
    """A cluster that is there already."""
    environment = {**os.environ, "KUBECONFIG": kubeconfig}
    with (
        tempfile.TemporaryDirectory() as folder,
        proxied_api((), environment, Path(folder) / "api") as api,
        httpx.Client(timeout=60, trust_env=False, limits=_MANY) as http,
    ):
        yield Cluster((), environment, api, http)


@contextmanager
def proxied_api(enter: Sequence[str], environment: dict[str, str], socket: Path) -> Iterator[httpx.Client]:
    """A client of Kubernetes' API: kubectl proxy knows the way to it."""
    with _background([*enter, "kubectl", "proxy", f"--unix-socket={socket}"], socket, environment):
        transport = httpx.HTTPTransport(uds=str(socket), retries=2)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as api:
            yield api


def _sources() -> Path:
    """The folder that `import tandem` comes from."""
    return Path(tandem.__file__).parents[1]


def _image(folder: Path) -> Path:
    """What containers find in /usr/local: the files of `image/`, and the places where the rest is bound."""
    shutil.copytree(HERE / "image", folder)
    for name in ("python", "site", "src", "kube"):
        (folder / "tandem" / name).mkdir(parents=True)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@contextmanager
def _taken_down(at: Sequence[str], folder: Path) -> Iterator[None]:
    """Take the cluster down at the end, and its folder away: at the end of this block, or of this process if
    that comes first. A pipe tells, as it ends with whoever holds it."""
    watcher = subprocess.Popen(
        [
            *("sh", "-c", 'read -r _; folder=$1; shift; "$@"; rm -rf "$folder"', "sh", str(folder)),
            *(sys.executable, str(SCRIPT), "down", *at),
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        watcher.stdin.close()
        watcher.wait()


@contextmanager
def _background(
    argv: Sequence[str], socket: Path, environment: dict[str, str] | None = None
) -> Iterator[None]:
    """A process that serves at a Unix socket; it has to end with its standard input, or with its cluster."""
    log = socket.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment)
    assert process.stdin is not None
    try:
        end = time.monotonic() + _STARTED_SECONDS
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(log.read_text("utf-8", "replace"))
            time.sleep(0.05)
        yield
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()


def _done(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}:\n{done.stdout}{done.stderr}"
    return done.stdout
