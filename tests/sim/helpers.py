"""Simulated engines and a client of them, in virtual time unless a test says otherwise."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.http import Client, Headers, Origin
from tandem.sim import CostProfile, EngineServer, EngineSpec, Fleet, parse, virtual

T = TypeVar("T")

MODEL = "m"
FOX = "The quick brown fox jumps over the lazy dog. "
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
# Round figures: a step 10 ms, a prompt token 1 ms, a stream nothing; a transfer 100 ms, its handshake 50 ms.
PROFILE = CostProfile(
    name="round",
    step=0.01,
    prefill_token=0.001,
    prefill_attention=0.0,
    decode_sequence=0.0,
    decode_context=0.0,
    kv_latency=0.1,
    kv_bandwidth=1e18,
    kv_handshake=0.05,
)


def flags(
    *more: str, role: str | None = None, policy: str = "fail", lease: float = 30, **extra: Any
) -> list[str]:
    """A vLLM command line; `role` adds the NIXL hand-off."""
    base = [
        "--model",
        MODEL,
        "--block-size",
        "16",
        "--max-model-len",
        "2048",
        "--enable-prompt-tokens-details",
    ]
    if "--num-gpu-blocks-override" not in more:
        base += ["--num-gpu-blocks-override", "200"]
    if role is not None:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"kv_lease_duration": lease, **extra},
        }
        base += ["--kv-transfer-config", json.dumps(config)]
    return [*base, *more]


@dataclass
class Answer:
    status: int
    headers: Headers
    body: bytes
    seconds: float
    broken: str = ""
    """How the connection ended, if not in good order."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """What was generated."""
        if self.body.startswith(b"data: "):
            return "".join(text_of(c) for e in self.events for c in e.get("choices", ()))
        return "".join(text_of(choice) for choice in self.json["choices"])

    @property
    def events(self) -> list[dict[str, Any]]:
        """A stream's JSON events."""
        lines = [e.removeprefix(b"data: ") for e in self.body.split(b"\n\n") if e.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def done(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or ""
    return text


@dataclass
class Engines:
    """A running fleet, a client, and the engines by number."""

    fleet: Fleet
    client: Client
    now: Callable[[], float]

    def __getitem__(self, number: int) -> EngineServer:
        return self.fleet.engines[number]

    async def ask(
        self, number: int, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """One request to an engine. A broken answer is returned as far as it came."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields: Headers = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        if body is not None and "content_type" not in headers:
            fields.append((b"content-type", b"application/json"))
        started, pieces, answer = self.now(), [], Answer(0, [], b"", 0.0)
        try:
            async with self.client.stream(
                Origin.parse(self[number].url),
                method or ("GET" if body is None else "POST"),
                path.encode(),
                fields,
                data,
                head_timeout=3600,
                idle_timeout=3600,
                retry=False,
            ) as response:
                answer.status, answer.headers = response.status, response.headers
                await response.relay(pieces.append)
        except Exception as error:
            answer.broken = f"{type(error).__name__}: {error}"
        answer.body, answer.seconds = b"".join(pieces), self.now() - started
        return answer

    async def complete(self, number: int, prompt: Any = FOX, *, fault: str = "", **more: Any) -> Answer:
        """A greedy completion of 8 tokens."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **more}
        return await self.ask(number, "/v1/completions", body, **({"x_sim_fault": fault} if fault else {}))

    async def prefill(self, number: int, prompt: Any = FOX, *, fault: str = "", **more: Any) -> Any:
        """The prefill leg; returns its kv_transfer_params."""
        answer = await self.complete(
            number, prompt, fault=fault, max_tokens=1, kv_transfer_params=REMOTE_DECODE, **more
        )
        assert answer.status == 200, answer.body
        return answer.json["kv_transfer_params"]

    async def metric(self, number: int, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.ask(number, "/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def idle(self, number: int) -> bool:
        """Whether the engine holds nothing for anyone."""
        state = self[number].engine.state()
        return not any(state[k] for k in ("running", "waiting", "loading", "leases")) and (
            state["free_blocks"] == state["blocks"]
        )


@asynccontextmanager
async def engines(*specs: EngineSpec | Sequence[str], **options: Any) -> AsyncIterator[Engines]:
    """Serve engines with these command lines."""
    import asyncio

    options = {"profile": PROFILE, "environment": {}, **options}
    made = [s if isinstance(s, EngineSpec) else EngineSpec(parse(s)) for s in specs]
    client = Client()
    async with Fleet(made, **options) as fleet:
        try:
            yield Engines(fleet, client, asyncio.get_running_loop().time)
        finally:
            await client.aclose()


def in_virtual_time(test: Callable[[], Awaitable[T]]) -> Callable[[], T]:
    """Makes an asynchronous test one that runs in virtual time."""

    def run() -> T:
        return virtual.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def pair(*more: str, **options: Any) -> tuple[list[str], list[str]]:
    """Command lines of a prefiller and a decoder."""
    return flags(*more, role="kv_producer", **options), flags(*more, role="kv_consumer", **options)
