"""One engine's HTTP side: vLLM's paths, and `/sim/…` to look inside and to break things."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

from tandem.http import Headers, Limits, Request, Responder, Server, serve
from tandem.sim import faults
from tandem.sim.engine import Engine
from tandem.sim.events import EventsConfig
from tandem.sim.generation import Generation, ServingOptions
from tandem.sim.model_files import PATH, ModelFiles
from tandem.sim.protocol import decode
from tandem.sim.refusal import Refused
from tandem.sim.vocabulary import Vocabulary
from tandem.sim.wire import Broken, Wire

logger = logging.getLogger("tandem.sim")

VERSION = "0.32.0"
# Paths that vLLM's instrumentation leaves out.
_UNCOUNTED = frozenset({"/health", "/load", "/metrics", "/ping", "/version", "/server_info"})
_LISTEN_LIMITS = Limits(connections=100_000, keep_alive_timeout=5.0)  # uvicorn's

Page = Callable[[Request, Wire], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Listen:
    host: str
    port: int
    """0: any free one."""


class EngineServer:
    """Serves one engine. `refuse` faults close its listener and open it again."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        options: ServingOptions,
        listen: Listen,
        events: EventsConfig,
        model_files: ModelFiles | None = None,
    ) -> None:
        self.engine = engine
        self.port = listen.port
        self._generation = Generation(engine, vocabulary, options)
        self._vocabulary = vocabulary
        self._options = options
        self._host = listen.host
        self._events = events
        self._model_files = model_files
        self._server: Server | None = None
        self._changing = asyncio.Lock()
        self._replays: asyncio.Task[None] | None = None
        self._pages: dict[str, tuple[str, Page]] = {
            "/health": ("GET", self._empty),
            "/ping": ("GET, POST", self._empty),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
            "/metrics": ("GET", self._metrics),
            "/kv_event_sources": ("GET", self._event_sources),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/invocations": ("POST", self._invocations),
            "/sim/state": ("GET", self._state),
            "/sim/faults": ("GET, POST, DELETE", self._faults),
        }

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    async def start(self) -> None:
        """Raises OSError when a port cannot be had."""
        await self.engine.start()
        if self.engine.publisher is not None:
            self._replays = asyncio.create_task(self.engine.publisher.serve_replays())
        await self._apply_refusal()

    async def close(self) -> None:
        """Stop at once."""
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        await self.engine.close()
        async with self._changing:
            if self._server is not None:
                await self._server.close()
                self._server = None

    @property
    def connections(self) -> int:
        return 0 if self._server is None else self._server.connections

    async def set_faults(self, text: str) -> None:
        """Replace the engine's own faults. Raises FaultError."""
        self.engine.faults.engine = faults.parse(text, whole_engine=True)
        if any(f.kind == "crash" and f.chunk is None for f in self.engine.faults.engine):
            self.engine.faults.engine = []
            self.engine.crash()
        self.engine.kick()
        await self._apply_refusal()

    async def _apply_refusal(self) -> None:
        async with self._changing:
            refusing = self.engine.faults.refusing or self.engine.dead
            if refusing and self._server is not None:
                server, self._server = self._server, None
                await server.close()
            elif not refusing and self._server is None:
                self._server = await serve(self, self._host, self.port, limits=_LISTEN_LIMITS)
                self.port = self._server.port

    def crashed(self) -> None:
        """The engine died: its process would end."""
        self.engine.network.spawn(self._apply_refusal())

    async def __call__(self, request: Request, responder: Responder) -> None:
        started = self.engine.clock.now()
        fields: Headers = [(b"server", b"uvicorn"), (b"vary", b"Origin")]
        wire = Wire(responder, self.engine.clock, fields)
        methods, page = self._pages.get(request.path, (None, None))
        handler = request.path
        if self._model_files is not None and request.path.startswith(PATH):
            await self._answer(self._model_file, request, wire)
            return  # by a proxy before the engine: its metrics know nothing of it
        if page is None and request.path.rstrip("/") in self._pages:
            handler = "none"
            self._redirect(request, wire)
        elif page is None or methods is None:
            handler = "none"
            wire.send(404, {"detail": "Not Found"})
        elif request.method not in methods.split(", "):
            handler = "none"
            wire.add((b"allow", methods.encode()))
            wire.send(405, {"detail": "Method Not Allowed"})
        elif not self._authorized(request):
            wire.send(401, {"error": "Unauthorized"})
        else:
            await self._answer(page, request, wire)
        if handler not in _UNCOUNTED and not handler.startswith("/sim/"):
            seconds, sizes = self.engine.clock.now() - started, (len(request.body), wire.sent)
            self.engine.metrics.http(handler, request.method, wire.status, seconds, *sizes)

    async def _answer(self, page: Page, request: Request, wire: Wire) -> None:
        if self._options.request_id_headers:
            request_id = request.header(b"x-request-id") or uuid4().hex.encode()
            wire.add((b"x-request-id", request_id))
        try:
            await page(request, wire)
        except Refused as refused:
            wire.send(refused.status, refused.body())
        except Broken:
            pass

    def _redirect(self, request: Request, wire: Wire) -> None:
        """A path that ends in "/" too many, answered as vLLM's web framework does."""
        host = request.header(b"host") or f"{self._host}:{self.port}".encode()
        wire.add((b"location", b"http://%b%b" % (host, request.path.rstrip("/").encode("latin-1"))))
        wire.send(307, b"")

    def _authorized(self, request: Request) -> bool:
        keys = self._options.api_keys
        if not keys or not request.path.startswith("/v1"):
            return True
        given = (request.header(b"authorization") or b"").decode("latin-1")
        return given.startswith("Bearer ") and given.removeprefix("Bearer ") in keys

    # Pages

    async def _empty(self, request: Request, wire: Wire) -> None:
        # Probes can be broken too: an engine that hangs does so everywhere.
        await wire.begin(self._probe_faults(), stream=False)
        wire.send(200, b"")

    def _probe_faults(self) -> list[faults.Fault]:
        kinds = ("hang", "delay", "reset", "status")
        return [f for f in self.engine.faults.engine if f.kind in kinds and f.chunk is None and f.leg is None]

    async def _version(self, request: Request, wire: Wire) -> None:
        wire.send(200, {"version": VERSION})

    async def _load(self, request: Request, wire: Wire) -> None:
        wire.send(200, {"server_load": 0})

    async def _metrics(self, request: Request, wire: Wire) -> None:
        await wire.begin(self._probe_faults(), stream=False)
        self.engine.report()
        wire.add((b"content-type", b"text/plain; version=1.0.0; charset=utf-8"))
        wire.send(200, self.engine.metrics.render())

    async def _event_sources(self, request: Request, wire: Wire) -> None:
        config = {name: getattr(self._events, name) for name in self._events.__dataclass_fields__}
        wire.send(200, {"0": config} if self._events.enabled else {})

    async def _models(self, request: Request, wire: Wire) -> None:
        wire.send(200, self._options.model_list(int(self.engine.clock.wall())))

    async def _tokenize(self, request: Request, wire: Wire) -> None:
        body = decode(request.body, request.header(b"content-type"))
        wire.send(200, self._generation.tokenize(body))

    async def _detokenize(self, request: Request, wire: Wire) -> None:
        body = decode(request.body, request.header(b"content-type"))
        wire.send(200, self._generation.detokenize(body))

    async def _chat(self, request: Request, wire: Wire) -> None:
        await self._generation.answer(request, wire, chat=True)

    async def _completions(self, request: Request, wire: Wire) -> None:
        await self._generation.answer(request, wire, chat=False)

    async def _invocations(self, request: Request, wire: Wire) -> None:
        await self._generation.answer(request, wire, chat=None)

    async def _model_file(self, request: Request, wire: Wire) -> None:
        assert self._model_files is not None
        await wire.begin(self._probe_faults(), stream=False)
        self._model_files.send(request, wire)

    async def _state(self, request: Request, wire: Wire) -> None:
        wire.send(200, {**self.engine.state(), "connections": self.connections})

    async def _faults(self, request: Request, wire: Wire) -> None:
        """GET: those in force. POST: replace them, by text in the grammar. DELETE: none any more."""
        if request.method != "GET":
            text = request.body.decode("utf-8", "replace") if request.method == "POST" else ""
            try:
                faults.parse(text, whole_engine=True)
            except faults.FaultError as error:
                raise Refused(str(error)) from None
            # The answer first: `refuse` and `crash` close this very connection.
            wire.send(200, {"faults": text})
            self.engine.network.spawn(self.set_faults(text))
            return
        wire.send(200, {"faults": [str(fault) for fault in self.engine.faults.engine]})
