"""Running the operator until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import tempfile
import uuid
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem.api.crd import NAME
from tandem.kube import Client, KubeError, connect
from tandem.kube import resources as kinds
from tandem.operator.process.alone import check_alone, check_definition
from tandem.operator.process.leader import LEASE_SECONDS, Leader, LostLease
from tandem.operator.process.loop import Loop
from tandem.operator.process.metrics import Metrics
from tandem.operator.process.serving import health_app, metrics_app, serving, tls_context, webhook_app
from tandem.operator.settings import Settings
from tandem.operator.texts import utc_now
from tandem.operator.webhooks.certificates import shared
from tandem.operator.webhooks.trust import trust

STALE_SECONDS = 180.0
"""A leader that has not heard the API server for so long is not ready."""
CERTIFICATE_SECONDS = 86_400.0
"""Between two looks at the webhooks' certificate, where no watch asks for one."""
CERTIFICATE_AGAIN_SECONDS = 10.0
"""After one that failed."""
LEASE = "tandem-operator"

log = logging.getLogger(__name__)


def _identity() -> str:
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, kw_only=True)
class OperatorConfig:
    settings: Settings = field(default_factory=Settings)
    kubeconfig: Path | None = None
    context: str | None = None
    leader_elect: bool = True
    lease_seconds: int = LEASE_SECONDS
    """After so long another takes over from one that has died."""
    take_over: bool = False
    host: str | None = None
    """Where it listens; None: on all addresses."""
    health_port: int = 8081
    metrics_port: int = 8080
    webhook_port: int | None = 9443
    """None: no webhooks."""
    webhook_service: str = "tandem-operator-webhook"
    """The Service by which API servers reach the webhooks."""
    webhook_secret: str = "tandem-operator-webhook"
    """Where the certificate that the operator makes is kept."""
    webhook_certificates: Path | None = None
    """A folder with tls.crt and tls.key of another maker (cert-manager), who also tells API servers."""
    identity: str = field(default_factory=_identity)


async def run(config: OperatorConfig) -> None:
    """Until SIGTERM or SIGINT.

    Raises NoCluster, NotAlone, KubeError (the API server does not answer at the start), and OSError where a
    port is taken or a certificate cannot be read.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with connect(config.kubeconfig, config.context) as client:
        operator = _Operator(client, config)
        work = asyncio.create_task(operator.run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            log.info("stopping")
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            pass
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


class _Operator:
    def __init__(self, client: Client, config: OperatorConfig) -> None:
        self._client = client
        self._config = config
        self._metrics = Metrics()
        self._metrics.watch_requests(client.sent)
        self._loop: Loop | None = None
        self._distrusted = asyncio.Event()
        """Set where API servers may no longer know our webhooks' certificate."""
        self._started = False

    async def run(self) -> None:
        config = self._config
        namespace = config.settings.system_namespace
        await check_alone(self._client, namespace, take_over=config.take_over)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            await stack.enter_async_context(
                serving(health_app(self._not_ready), config.host, config.health_port)
            )
            await stack.enter_async_context(
                serving(metrics_app(self._metrics.text), config.host, config.metrics_port)
            )
            if config.webhook_port is not None:
                await self._webhooks(stack, group, config.webhook_port)
            self._started = True
            if config.leader_elect:
                await self._lead(namespace)
            else:
                await self._work(self._client)

    async def _lead(self, namespace: str) -> None:
        """Works while it holds the lease. Without it, it stands by: its webhooks are served all the time."""
        config = self._config
        leader = Leader(self._client, namespace, LEASE, config.identity, lasts=config.lease_seconds)
        while True:
            await leader.acquire()
            try:
                await self._led(leader)
            except ExceptionGroup as failures:
                _, others = failures.split(LostLease)
                if others:
                    await leader.release()
                    raise others.exceptions[0] from None
                log.warning("%s: stands by", failures.exceptions[0])
            except asyncio.CancelledError:
                await leader.release()
                raise

    async def _led(self, leader: Leader) -> None:
        self._metrics.leads.set(1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(leader.hold())
                group.create_task(self._work(self._client.guarded(leader.check)))
        finally:  # before the lease is given back
            self._loop = None
            self._metrics.loop_ended()
            self._metrics.leads.set(0)

    async def _work(self, client: Client) -> None:
        self._loop = Loop(client, self._config.settings, self._metrics, self._distrusted.set)
        await self._loop.run()

    async def _still_alone(self) -> None:
        """Raises NotAlone where another owner has put a definition of theirs in place of ours."""
        definition = await self._client.get(kinds.DEFINITION, NAME)
        if definition is not None and not self._config.take_over:
            check_definition(definition)

    def _not_ready(self) -> str | None:
        if not self._started:
            return "starting"
        if self._loop is not None and self._loop.age > STALE_SECONDS:
            return f"the API server was last heard {self._loop.age:.0f} s ago"
        return None

    async def _webhooks(self, stack: AsyncExitStack, group: asyncio.TaskGroup, port: int) -> None:
        folder = self._config.webhook_certificates
        own = folder is None
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-webhooks-")))
            await self._certificate(folder)
        context = tls_context(folder / "tls.crt", folder / "tls.key")
        await stack.enter_async_context(serving(webhook_app(), self._config.host, port, context))
        group.create_task(self._renew(folder, context, own=own))

    async def _certificate(self, folder: Path) -> None:
        """Into the folder, and to the API servers."""
        config, namespace = self._config, self._config.settings.system_namespace
        made = await shared(self._client, config.webhook_secret, config.webhook_service, namespace, utc_now())
        (folder / "tls.key").write_bytes(made.key)
        (folder / "tls.crt").write_bytes(made.certificate)
        await trust(self._client, config.webhook_service, namespace, made.bundle)

    async def _renew(self, folder: Path, context: ssl.SSLContext, *, own: bool) -> None:
        pause = CERTIFICATE_SECONDS
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._distrusted.wait()
            self._distrusted.clear()
            pause = CERTIFICATE_SECONDS
            try:
                await self._still_alone()
                if own:
                    await self._certificate(folder)
                context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
            except (KubeError, OSError) as error:
                log.warning("the webhooks' certificate could not be renewed: %s", error)
                pause = CERTIFICATE_AGAIN_SECONDS
