"""The router as a process: its routes, its parts wired together, its life from start to drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST

from tandem.config import DECODING_PATH, RouterConfig, without_effect
from tandem.http import Client, Request, Responder, Server
from tandem.prompt import PromptCounter
from tandem.router.admin import Admin
from tandem.router.budgets import Budgets
from tandem.router.canary import Prober
from tandem.router.choosing import Choosing
from tandem.router.classify import Api
from tandem.router.connectors import Connector, LMCache, Nixl, Receiver
from tandem.router.counting import Counter
from tandem.router.counting_process import CountingProcess
from tandem.router.discovery import Discovery, MergedDiscovery
from tandem.router.discovery.configured import discovery as discovery_of
from tandem.router.engine_authorization import EngineAuthorization
from tandem.router.errors import ApiError, Unauthorized
from tandem.router.fleet import Fleet
from tandem.router.flow import Flow
from tandem.router.gate import Gate
from tandem.router.handover import Handovers
from tandem.router.headers import request_id
from tandem.router.keys import Caller, KeyFile, KeyStore
from tandem.router.knowledge import Knowledge
from tandem.router.legs import Legs
from tandem.router.listening import listen, listening
from tandem.router.local_counter import load_counter
from tandem.router.log_lines import LogLines
from tandem.router.metrics import Metrics
from tandem.router.model_files import ModelFiles
from tandem.router.notifications import Notifications
from tandem.router.piecewise import piecewise
from tandem.router.reading import Reading
from tandem.router.strategies import DecoderLoad, DecoderScore, KvAware, make
from tandem.router.waiting import Line

logger = logging.getLogger("tandem.router")

_JSON = (b"content-type", b"application/json")


class App:
    """The allow-list of paths. Anything else that engines serve is not reachable through a router."""

    def __init__(
        self,
        fleet: Fleet,
        flow: Flow,
        metrics: Metrics,
        *,
        served: Collection[str] = (),
        private: bool = False,
        invocation_path: str = "/invocations",
        unknown: Callable[[], str | None] = lambda: None,
        keys: KeyStore | None = None,
    ) -> None:
        """`served`: the names of models that requests may use; none: all. `private`: what names engines is
        left to the admin port. `invocation_path`: where a request's body says which API it is for.
        `unknown`: why too little is known of what engines there are to be ready, if so. `keys`: who may
        call; None: everybody."""
        self._served = frozenset(served)
        self.fleet = fleet
        self._private = private
        self._unknown = unknown
        self.admin: Server | None = None
        self.knowledge: Knowledge | None = None
        """What is known of engines' caches by their events; None unless the strategy is kvaware."""
        self._flow = flow
        self._metrics = metrics
        self._keys = keys
        self._pages: dict[str, Callable[[Responder], None]] = {
            "/health": self._health,
            "/ready": self._ready,
            DECODING_PATH: self._decoding,
            "/ping": self._ready,
            "/metrics": self._render_metrics,
        }
        if private:
            del self._pages["/metrics"]
        self._generation: dict[str, Api | None] = {invocation_path: None, **{api.value: api for api in Api}}
        self.draining = False

    async def __call__(self, request: Request, responder: Responder) -> None:
        # What needs decoding first (escapes, an absolute URL) might mean another path to a proxy in front.
        escaped = request.target.partition(b"?")[0] != request.path.encode()
        generates = request.path in self._generation and not escaped
        caller: Caller | None = None
        if self._keys is not None and (request.path.startswith("/v1/") or request.path in self._generation):
            try:
                caller = self._keys.caller(request.header(b"authorization"))
            except Unauthorized as error:
                self._turn_away(request, responder, error)
                return
        page = self._page(request.path, caller) if not escaped else None
        if generates and request.method == "POST":
            await self._flow.serve(request, responder, self._generation[request.path], caller)
        elif page is not None and request.method in ("GET", "HEAD"):
            page(responder)
        else:
            allow = [b"POST"] * generates + [b"GET, HEAD"] * (page is not None)
            self._refuse(request, responder, allow=b", ".join(allow))

    def _page(self, path: str, caller: Caller | None) -> Callable[[Responder], None] | None:
        return partial(self._models, caller) if path == "/v1/models" else self._pages.get(path)

    def _turn_away(self, request: Request, responder: Responder, error: Unauthorized) -> None:
        rid = request_id(request)
        logger.info("%s from %s ends with HTTP 401: %s", rid, request.client, error.message)
        responder.send(401, [*error.headers(), (b"x-request-id", rid.encode())], error.body())

    def _refuse(self, request: Request, responder: Responder, *, allow: bytes) -> None:
        if not allow:
            path = request.target.partition(b"?")[0].decode("latin-1")
            error = ApiError(404, f"There is no {path} here.", kind="not_found_error")
            responder.send(404, error.headers(), error.body())
        else:
            error = ApiError(405, f"{request.path} does not take {request.method}.")
            responder.send(405, [*error.headers(), (b"allow", allow)], error.body())

    def _health(self, responder: Responder) -> None:
        responder.send(200, [_JSON], b'{"status":"ok"}')

    def _ready(self, responder: Responder) -> None:
        self._say(responder, self.fleet.missing)

    def _decoding(self, responder: Responder) -> None:
        self._say(responder, self.fleet.unanswered)

    def _say(self, responder: Responder, missing: str | None) -> None:
        why = "draining" if self.draining else self._unknown() or missing
        status: dict[str, Any] = {"ready": why is None, "reason": why}
        if self._private:
            status["reason"] = why and why.partition(":")[0]
        else:
            status["unproved"] = self.fleet.unproved_shown
        responder.send(503 if why else 200, [_JSON], msgspec.json.encode(status))

    def _render_metrics(self, responder: Responder) -> None:
        responder.send(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], self._metrics.render())

    def _models(self, caller: Caller | None, responder: Responder) -> None:
        cards = [card for card in self.fleet.models if not self._served or card["id"] in self._served]
        if caller is not None:
            cards = [card for card in cards if caller.may_use(card["id"])]
        responder.send(200, [_JSON], msgspec.json.encode({"object": "list", "data": cards}))


@asynccontextmanager
async def running(
    config: RouterConfig,
    local: PromptCounter | None,
    *,
    discovery: Discovery | None = None,
    waiting_interval: float = 0.5,
) -> AsyncIterator[tuple[Server, App]]:
    """A router at work inside the block; drained and closed after it.

    `local` counts prompts (None: engines do).
    `waiting_interval`: seconds between two looks at an engine that is not ready yet.

    Raises ValueError, which names the flag, for a file of keys that cannot be used."""
    keys = KeyFile(config.api_keys_file) if config.api_keys_file is not None else None
    authorization = EngineAuthorization(config)
    connector = _connector(config)
    client = Client(keep_alive=config.engine_keep_alive)
    fleet = Fleet(
        suspect_after=config.suspect_after,
        survives_decoder_restart=connector.survives_decoder_restart,
        pairing=config.pairing,
        ramp_up=config.ramp_up,
        clock=asyncio.get_running_loop().time,
        defer=asyncio.get_running_loop().call_later,
    )
    legs = Legs(client, config, authorization)
    names_tokenizer = bool(config.model_path or config.tokenizer)
    process = CountingProcess(config) if local and names_tokenizer and config.count_in_process_bytes else None
    counter = Counter(local, legs, fleet, process, config.count_in_process_bytes, config.counted_model)
    files = ModelFiles(config, fleet, legs, counter) if config.model_files_path is not None else None
    line = Line(config.reservation_queue)
    budgets = Budgets(on_free=line.changed)
    fleet.on_change(line.changed)
    notifications = Notifications()
    handovers = Handovers(
        connector, legs, fleet, notifications, notification_timeout=config.notification_timeout
    )
    gate = Gate(config, fleet)
    made = make(config, piecewise)
    knowledge: Knowledge | None = None
    if made.index is not None and isinstance(made.strategy, KvAware):
        knowledge = Knowledge(fleet, made.index, made.strategy)
    source = discovery or discovery_of(config)
    merged = source if isinstance(source, MergedDiscovery) else MergedDiscovery({})
    metrics = Metrics(fleet, gate, budgets, line, handovers, knowledge, merged.sources, keys)
    decoders = DecoderScore(lambda e: DecoderLoad(e.held_tokens, e.kv_use, budgets.share(e)), made.prefixes)
    choosing = Choosing(config, fleet, counter, connector, budgets, made.strategy, decoders)
    reading = Reading()
    flow = Flow(config, fleet, legs, choosing, gate, handovers, line, metrics, reading)
    app = App(
        fleet,
        flow,
        metrics,
        served=config.served_model_name,
        private=config.admin_port is not None,
        invocation_path=config.invocation_path,
        unknown=lambda: merged.missing,
        keys=keys.store if keys is not None else None,
    )
    app.knowledge = knowledge
    admin = Admin(
        fleet,
        flow,
        choosing,
        budgets,
        metrics,
        threshold=config.routing_threshold,
        index=made.index,
        sources=merged.sources,
        model_files=files.told if files is not None else None,
    )
    prober = Prober(
        source,
        fleet,
        legs,
        counter,
        handovers,
        budgets,
        waiting_interval=waiting_interval,
        on_restart=knowledge.restarted if knowledge is not None else lambda engine: None,
        block_size=config.kv_block_size if made.prefixes is not None else None,
        served=config.served_model_name,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        await stack.enter_async_context(reading)
        if knowledge is not None:
            stack.callback(knowledge.close)
        if process is not None:
            await stack.enter_async_context(process)
        if connector.pushes:
            try:
                address = await stack.enter_async_context(notifications.listening(config.lmcache_notify))
            except OSError as error:
                raise OSError(f"--lmcache-notify: {error}") from error
            logger.info("listening for notifications at %s", address)
        stack.push_async_callback(handovers.aclose)
        if files is not None:
            await stack.enter_async_context(_background(files.run()))
        if keys is not None:
            await stack.enter_async_context(_background(keys.follow()))
        await stack.enter_async_context(_background(authorization.follow()))
        await stack.enter_async_context(_background(prober.run()))
        if config.admin_port is not None:
            app.admin = await listen(admin, "--admin-", config.admin_host, config.admin_port)
            stack.push_async_callback(app.admin.close)
        server = await stack.enter_async_context(listening(config, app, metrics.count_refused))
        try:
            yield server, app
        finally:
            app.draining = True
            try:
                # Those who watch /ready send no more; until they have seen it, requests are still taken.
                await asyncio.sleep(config.drain_delay)
                if not await server.drain(config.drain_timeout):
                    logger.warning("not every answer was finished within %g s", config.drain_timeout)
            finally:
                await server.close()


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A task that runs for the length of a block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _connector(config: RouterConfig) -> Connector:
    if config.connector == "nixl":
        return Nixl()
    assert config.lmcache_buffer_chunks is not None  # checked by RouterConfig

    def receiver(decode_url: str) -> Receiver:
        host, ports = config.receiver(decode_url)
        return Receiver(host, ports.init, ports.alloc)

    return LMCache(
        receiver,
        chunk_size=config.lmcache_chunk_size,
        buffer_chunks=config.lmcache_buffer_chunks,
        ranks=config.lmcache_ranks,
        longest=config.lmcache_step_tokens,
    )


async def _until_signalled(config: RouterConfig, local: PromptCounter | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config, local) as (server, app):
        host = f"[{config.host}]" if ":" in config.host else config.host
        scheme = "http" if config.tls_certificate is None else "https"
        logger.info("listening on %s://%s:%d", scheme, host, server.port)
        if app.admin is not None:
            logger.info("admin port: http://%s:%d", config.admin_host, app.admin.port)
        logger.info(
            "mode: %d prefill, %d decode, %d without a role%s, connector %s, strategy %s, threshold %d, "
            "counting %s",
            len(config.prefill),
            len(config.decode),
            len(config.engine),
            " and those discovered" if config.discovers else "",
            config.connector,
            config.routing_strategy,
            config.routing_threshold,
            "here"
            if local
            else "by engines" + (" until their files are here" if config.model_files_path else ""),
        )
        _calm_garbage_collector()
        await stop.wait()
        logger.info("draining for at most %g s", config.drain_timeout)


def _calm_garbage_collector() -> None:
    """Look for cycles seldom, and not among what the router has had since its start.

    Nothing of a request is in a cycle when it goes well. With Python's own thresholds the search takes 5 % of
    the time at 300 streams, and every so often 10 ms at once.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def run(config: RouterConfig) -> None:
    """Run a router until SIGTERM or SIGINT.

    Raises OSError when it cannot listen, ValueError for a bad model; both name the flags.
    """
    # Not in the format, so not worth looking up for each line (the logging HOWTO's «Optimization»).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for each request to an API server
    logging.basicConfig(level=config.log_level.upper(), handlers=[LogLines(sys.stderr)])
    for told in without_effect(config):
        logger.warning("%s", told)
    uvloop.run(_until_signalled(config, _load_counter(config)))


def _load_counter(config: RouterConfig) -> PromptCounter | None:
    """Raises ValueError that names the flags."""
    try:
        return load_counter(config)
    except (OSError, ValueError) as error:
        given = {
            "--model-path": config.model_path,
            "--tokenizer": config.tokenizer,
            "--chat-template": config.chat_template,
        }
        raise ValueError(f"{', '.join(flag for flag, value in given.items() if value)}: {error}") from error
