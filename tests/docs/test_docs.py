"""Every example of README.md and docs/ is tried: commands parsed, manifests planned, links followed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from tandem.api import parse_endpoint
from tandem.api.annotations import Extensions, parse_annotations
from tandem.cli import parse
from tandem.config import RouterConfig, flags_tables, router_config
from tandem.engine import (
    Core,
    EnginePorts,
    Machine,
    engine_count,
    kv_events_config,
    plan,
    pod_kv_events,
)
from tandem.http import Client
from tandem.router.budgets import Budgets
from tandem.router.connectors import Nixl
from tandem.router.discovery.engine_list import BadList, read_engines
from tandem.router.fleet import Fleet
from tandem.router.gate import Gate
from tandem.router.handover import Handovers
from tandem.router.keys import ApiKey, KeyFile, Limits, keys_of, read_keys
from tandem.router.knowledge import Knowledge
from tandem.router.legs import Legs
from tandem.router.metrics import Metrics
from tandem.router.notifications import Notifications
from tandem.router.strategies import KvAware, KvIndex, KvPrefixes
from tandem.router.waiting import Line

from .pages import PAGES, ROOT, blocks

MACHINE = Machine(
    cores=(Core((0,), 0), Core((1,), 0), Core((2,), 0)),
    gpus=(),
    memory_bytes=1 << 34,
    accelerator="cpu",
    python="python",
)


def commands(only: str = "") -> Iterator[list[str]]:
    for _, text in blocks("sh", only):
        for line in text.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_is_one_that_exists(words: list[str]) -> None:
    match words:
        case [".venv/bin/tandem", *arguments]:
            parsed = parse(arguments)
            if parsed.command == "router":
                router_config(parsed)
        case ["make", *arguments]:
            subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
        case ["git" | "cd", *_]:
            pass
        case ["docker", "build", "-f", file, *_]:
            # Its steps are run in tests/operator/test_images.py.
            assert (ROOT / file).is_file()
        case ["kubectl", *_]:
            # Run as written, on a real cluster, in tests/cluster/test_guide.py.
            assert shlex.join(words) in map(shlex.join, commands("kubernetes.md"))
        case ["curl" | "openssl", *_] if shlex.join(words) in map(shlex.join, commands("clients.md")):
            pass  # run as written in tests/docs/test_clients.py
        case ["curl", address, *_]:
            # Sent for real, to real engines, in tests/engines.
            # `/admin/route` is what tests/router/test_admin_route.py asks.
            assert address in (
                "http://127.0.0.1:8000/v1/chat/completions",
                "http://127.0.0.1:9100/admin/route",
            )
        case ["vllm", "serve", "MODEL", "--kv-events-config", settings]:
            rendered = json.loads(kv_events_config(pod_kv_events()))
            assert json.loads(settings).items() <= rendered.items()
        case _:
            pytest.fail(f"no test knows how to try {shlex.join(words)}")


MANIFESTS = [(page, text) for page, text in blocks("yaml") if page not in ("discovery.md", "keys.md")]


@pytest.mark.parametrize(("page", "text"), MANIFESTS)
def test_every_manifest_can_be_planned(page: str, text: str, tmp_path: Path) -> None:
    endpoint, _ = parse_endpoint(text, source=page)
    (tmp_path / "config.json").write_text("{}")
    ports = [EnginePorts(http=9000 + i, side_channel=9100 + i) for i in range(engine_count(endpoint))]
    assert plan(endpoint, MACHINE, tmp_path, ports).engines


def of_discovery(language: str) -> list[str]:
    return [text for _, text in blocks(language, "discovery.md")]


def test_the_lists_of_engines_are_lists_of_engines() -> None:
    in_yaml, service = of_discovery("yaml")
    (in_json,) = of_discovery("json")
    for text, roles in ((in_yaml, {"prefill", "decode"}), (in_json, {"prefill"})):
        assert {member.role.value for member in read_engines(text, lambda host: None)} == roles
    assert yaml.safe_load(service)["kind"] == "Service"


def test_the_mistake_that_is_shown_is_told_in_these_words() -> None:
    told = re.search(r"as in `(line 5: .*?)`", (ROOT / "docs" / "discovery.md").read_text())
    assert told is not None
    with pytest.raises(BadList, match=re.escape(told[1])):
        read_engines(
            "engines:\n- url: http://a:1\n  role: both\n- url: http://b:1\n  rol: both", lambda host: None
        )


def test_the_service_is_one_that_the_flags_name() -> None:
    _, text = of_discovery("yaml")
    service = yaml.safe_load(text)
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (port,) = service["spec"]["ports"]
    assert service["spec"]["clusterIP"] == "None"
    assert f"both=_{port['name']}._tcp.{name}.{namespace}.svc.cluster.local\n" in "".join(of_discovery("sh"))


def test_the_file_of_keys_is_one(tmp_path: Path) -> None:
    (_, text), (_, resource) = blocks("yaml", "keys.md")
    annotations = yaml.safe_load(resource)["metadata"]["annotations"]
    assert parse_annotations(annotations) == (Extensions(api_keys_secret="keys-of-chat"), [])
    (tmp_path / "keys.yaml").write_text(text)
    first, second = keys_of(str(tmp_path / "keys.yaml"))
    assert first.limits == Limits(5.0, 20, 200_000, 16)
    assert first.models == {"my-model", "my-adapter"}
    assert second == ApiKey("team-b", second.digest)


def test_the_mistake_in_keys_that_is_shown_is_told_in_these_words(tmp_path: Path) -> None:
    told = re.search(r"as in `(line 4: .*?)`", (ROOT / "docs" / "keys.md").read_text())
    assert told is not None
    with pytest.raises(BadList, match=re.escape(told[1])):
        read_keys(b"keys:\n- name: a\n  sha256: 0\n  cache_salt: x")


def test_the_router_flags_are_all_described() -> None:
    assert flags_tables() in (ROOT / "docs" / "configuration.md").read_text()


@pytest.fixture
async def metrics(tmp_path: Path) -> AsyncIterator[Metrics]:
    """All that a router can have."""
    config, client, fleet = RouterConfig(decode=("http://127.0.0.1:1",)), Client(), Fleet()
    handovers = Handovers(
        Nixl(), Legs(client, config), fleet, Notifications(), notification_timeout=config.notification_timeout
    )
    index = KvIndex()
    knowledge = Knowledge(fleet, index, KvAware(KvPrefixes(index)))
    (tmp_path / "keys.yaml").write_text("keys: []")
    keys = KeyFile(str(tmp_path / "keys.yaml"))
    yield Metrics(fleet, Gate(config, fleet), Budgets(), Line(1), handovers, knowledge, keys=keys)
    knowledge.close()


async def test_the_metrics_are_all_described(metrics: Metrics) -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("configuration.md", "keys.md"))
    described = set(re.findall(r"^\| `(tandem_\w+)`", text, re.MULTILINE))
    exported = set()
    for family in metrics.registry.collect():
        exported.add(family.name + "_total" if family.type == "counter" else family.name)
    assert described == exported


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_dependency_is_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [
        d for group in project["optional-dependencies"].values() for d in group
    ]
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    for dependency in wanted:
        name = re.split(r"[\[><=;~ ]", dependency)[0].lower()
        assert name in text or name in ("tandem-dpd", "types-pyyaml"), name
