"""A router that follows pods of a real API server. No kubelet runs there: tests say what one would report.
Each pod is a simulated engine at an address of its own; all have one port, as pods do."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tandem.config import RouterConfig
from tandem.http import Client, Origin
from tandem.kube import Client as Cluster
from tandem.kube import Object, connect
from tandem.kube.resources import POD
from tandem.router.app import App, running
from tandem.router.engines import Engine, EngineRole, State
from tandem.sim import EngineServer, EngineSpec, Fleet, parse
from tandem.sim.handoff import Network

from ..api.conftest import ApiServer, new_namespace
from ..sim.helpers import MODEL, PROFILE, pair

ROLE = "inference.sagemaker.aws.amazon.com/dpd-role"
ME = "test"
PAIR = (EngineRole.PREFILL, EngineRole.DECODE)


class Pods:
    """Pods of a namespace, as a kubelet that runs them would report."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    async def start(self, name: str, address: str, role: str, **labels: str) -> Object:
        made = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {"app": "m", ROLE: role, **labels},
            },
            # On a node: there it is the kubelet that takes a deleted pod away, once it has ended.
            "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "image": "engine"}]},
        }
        await self.cluster.create(made, POD, manager=ME)
        return await self.report(name, address, ready=True)

    async def report(self, name: str, address: str, *, ready: bool) -> Object:
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        return await self.cluster.patch(
            POD, name, self.namespace, {"status": status}, manager=ME, subresource="status"
        )

    async def end(self, name: str) -> None:
        """Have it end, as a Deployment does that is made smaller or new."""
        await self.cluster.delete(POD, name, self.namespace)
        found = await self.cluster.get(POD, name, self.namespace)
        assert found is not None
        assert found["metadata"]["deletionTimestamp"]

    async def ended(self, name: str, server: ApiServer) -> None:
        words = ("delete", "pod", name, "-n", self.namespace, "--grace-period=0", "--force")
        done = await asyncio.to_thread(server.kubectl, *words)
        assert done.returncode == 0, done.stderr


class Load:
    """Clients that ask all the time, and what became of their requests."""

    def __init__(self, port: int, client: Client) -> None:
        self._origin = Origin("127.0.0.1", port)
        self._client = client
        self._over = False
        self.answers: Counter[str] = Counter()

    async def run(self, clients: int = 8) -> None:
        await asyncio.gather(*(self._client_number(number) for number in range(clients)))

    def stop(self) -> None:
        self._over = True

    async def more(self, number: int) -> None:
        """Until so many more have been answered."""
        until = self.answers.total() + number
        while self.answers.total() < until:
            await asyncio.sleep(0.01)

    async def _client_number(self, number: int) -> None:
        turn = 0
        while not self._over:
            turn += 1
            long, stream = (turn + number) % 2 == 0, number % 2 == 0
            body = {
                "model": MODEL,
                "prompt": [number * 100 + turn % 100 + 1] * (200 if long else 8),
                "max_tokens": 20,
                "stream": stream,
            }
            self.answers[await self._ask(json.dumps(body).encode(), stream)] += 1

    async def _ask(self, body: bytes, stream: bool) -> str:
        pieces: list[bytes] = []
        headers = [(b"content-type", b"application/json")]
        async with self._client.stream(
            self._origin, "POST", b"/v1/completions", headers, body, head_timeout=60, idle_timeout=60
        ) as response:
            await response.relay(pieces.append)
        data = b"".join(pieces)
        if response.status != 200:
            return f"{response.status}: {data.decode()}"
        whole = data.endswith(b"data: [DONE]\n\n") if stream else b'"completion_tokens":20' in data
        return "whole" if whole else f"broken: {data.decode()}"

    async def metric(self, name: str) -> float:
        pieces: list[bytes] = []
        async with self._client.stream(self._origin, "GET", b"/metrics", []) as response:
            await response.relay(pieces.append)
        lines = b"".join(pieces).decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


class World:
    def __init__(self, app: App, pods: Pods, load: Load, port: int, sims: dict[str, EngineServer]) -> None:
        self.app = app
        self.pods = pods
        self.load = load
        self.port = port
        self.sims = sims
        """By their addresses."""

    def at(self, address: str) -> Engine:
        url = f"http://{address}:{self.port}"
        return next(e for e in self.app.fleet.engines if e.url == url)

    async def used(self, *addresses: str, known: int | None = None) -> None:
        """Until these engines and no others are in use, each with each. `known`: how many there are, these
        and those that have nobody to be used with."""
        fleet = self.app.fleet
        urls = {f"http://{address}:{self.port}" for address in addresses}

        def used() -> bool:
            ready = [e for e in fleet.engines if e.state is State.READY]
            pairs = [(p, d) for p in ready for d in ready if (p.role, d.role) == PAIR]
            proved = all(fleet.is_proved(p, d) for p, d in pairs)
            return proved and {e.url for e in ready} == urls and len(fleet.engines) == (known or len(urls))

        while not used():
            await asyncio.sleep(0.02)

    async def left(self, engine: Engine) -> None:
        """Until the router has no part in an engine any more."""
        while engine in self.app.fleet.engines or engine.in_flight or engine.held:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def world(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, prefill: list[str], decode: list[str]
) -> AsyncIterator[World]:
    """Engines at these addresses, whose pods a test has to start, and a router that follows them."""
    namespace = await asyncio.to_thread(new_namespace, server)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    port = _free_port()
    prefiller, decoder = pair("--max-num-batched-tokens", "2048")
    network, sims = Network(), {}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        for addresses, line in ((prefill, prefiller), (decode, decoder)):
            for address in addresses:
                fleet = Fleet(
                    [EngineSpec(parse(line), port=port)],
                    host=address,
                    profile=PROFILE,
                    time_scale=3.0,
                    environment={},
                    network=network,
                )
                (sims[address],) = (await stack.enter_async_context(fleet)).engines
        cluster = await stack.enter_async_context(connect())
        client = Client()
        stack.push_async_callback(client.aclose)
        config = RouterConfig(
            port=0,
            discover_kubernetes=f"{namespace}:{port}:app=m",
            pair_labels=("kv-layout",),
            routing_threshold=100,
            ramp_up=0.0,
            log_level="error",
        )
        router, app = await stack.enter_async_context(running(config, None, waiting_interval=0.05))
        load = Load(router.port, client)
        yield World(app, Pods(cluster, namespace), load, port, sims)


def _free_port() -> int:
    """One that is free at every address of this machine."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


P1, P2, D1, D2 = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"


async def test_no_request_is_lost_while_pods_come_are_not_ready_and_end(
    bare_api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(bare_api_server, monkeypatch, prefill=[P1, P2], decode=[D1, D2]) as w:
        pods, load = w.pods, w.load
        await pods.start("p1", P1, "prefill")
        await pods.start("d1", D1, "decode")
        await w.used(P1, D1)
        clients = asyncio.create_task(load.run())
        await load.more(10)

        # They come.
        await pods.start("p2", P2, "prefill")
        await pods.start("d2", D2, "decode")
        await w.used(P1, P2, D1, D2)
        await load.more(20)

        # One is not ready for a while: whoever asked it would be refused.
        unready = w.at(D1)
        await pods.report("d1", D1, ready=False)
        await w.left(unready)
        await w.sims[D1].set_faults("refuse")
        await load.more(20)
        await w.sims[D1].set_faults("")
        await pods.report("d1", D1, ready=True)
        await w.used(P1, P2, D1, D2)

        # Two end: they get no more before they have ended.
        for name, address in (("p1", P1), ("d1", D1)):
            ending = w.at(address)
            await pods.end(name)
            await w.left(ending)
            await w.sims[address].set_faults("refuse")
        await load.more(20)
        for name in ("p1", "d1"):
            await pods.ended(name, bare_api_server)
        await load.more(10)

        # Another pod takes the place, name and address of one.
        await w.sims[P1].set_faults("")
        await pods.start("p1", P1, "prefill")
        await w.used(P1, P2, D2)
        await load.more(20)
        load.stop()
        await clients
        assert set(load.answers) == {"whole"}
        assert await load.metric("tandem_leg_failures_total") == 0
        assert await load.metric("tandem_discovery_age_seconds{") < 120


async def test_pods_of_two_revisions_pair_while_their_kv_is_the_same(
    bare_api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while an endpoint changes: new decoders beside old ones, and a prefiller of each kind."""
    async with world(bare_api_server, monkeypatch, prefill=[P1, P2], decode=[D1, D2]) as w:
        same = {"tandem.dev/kv-layout": "one"}
        await w.pods.start("p1", P1, "prefill", **same, **{"pod-template-hash": "a"})
        await w.pods.start("d1", D1, "decode", **same, **{"pod-template-hash": "b"})
        await w.pods.start("d2", D2, "decode", **same, **{"pod-template-hash": "c"})
        await w.pods.start("p2", P2, "prefill", **{"tandem.dev/kv-layout": "two", "pod-template-hash": "d"})
        await w.used(P1, D1, D2, known=4)
        fleet = w.app.fleet
        for address in (D1, D2):
            assert [p.url for p in fleet.prefillers_for(w.at(address)).all] == [f"http://{P1}:{w.port}"]
            assert not fleet.may_pair(w.at(P2), w.at(address))
        assert {e.labels["revision"] for e in fleet.of(EngineRole.DECODE)} == {"b", "c"}
        assert {e.labels["node"] for e in fleet.engines} == {"node-1"}
