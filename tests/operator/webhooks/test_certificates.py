"""The webhooks' certificate is made, shared between replicas, and renewed before it ends."""

from __future__ import annotations

import asyncio
import base64
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from tandem.kube import resources as kinds
from tandem.operator.process.serving import serving, tls_context, webhook_app
from tandem.operator.webhooks.certificates import Certificate, make, shared

from ..endpoints import manifest
from ..fake_api import FakeApi

NOW = datetime.now(UTC)


async def certificate(api: FakeApi, now: datetime = NOW, service: str = "hook") -> Certificate:
    return await shared(api, "secret", service, "system", now)  # type: ignore[arg-type]


async def test_the_first_operator_makes_it_and_the_others_use_it() -> None:
    api = FakeApi()
    first = await certificate(api)
    assert await certificate(api) == first
    assert first.names() == {"hook.system.svc", "hook.system.svc.cluster.local"}
    assert first.expires() > NOW + timedelta(days=300)


async def test_of_two_that_make_it_at_once_one_wins() -> None:
    api = FakeApi()
    one, two = await asyncio.gather(certificate(api), certificate(api))
    assert one == two


async def test_it_is_renewed_before_it_ends_and_the_old_one_stays_trusted() -> None:
    api = FakeApi()
    old = await certificate(api)
    assert await certificate(api, NOW + timedelta(days=300)) == old
    later = NOW + timedelta(days=310)
    new = await certificate(api, later)
    assert new.certificate != old.certificate
    assert new.expires() > later + timedelta(days=300)
    assert base64.b64decode(new.bundle) == new.certificate + old.certificate


async def test_one_for_another_name_is_made_anew() -> None:
    api = FakeApi()
    await certificate(api)
    assert "other.system.svc" in (await certificate(api, service="other")).names()


@pytest.mark.parametrize("data", [{}, {"tls.crt": "?"}, {"tls.crt": "Zm9v", "tls.key": "Zm9v"}, None])
async def test_a_secret_that_holds_none_is_mended(data: dict[str, str] | None) -> None:
    api = FakeApi()
    metadata = {"name": "secret", "namespace": "system"}
    await api.create({"metadata": metadata, "data": data}, kinds.SECRET, manager="x")
    made = await certificate(api)
    assert await certificate(api) == made


async def test_the_webhooks_serve_it_and_a_new_one_from_the_moment_it_is_loaded(tmp_path: Path) -> None:
    def write(found: Certificate) -> None:
        (tmp_path / "tls.crt").write_bytes(found.certificate)
        (tmp_path / "tls.key").write_bytes(found.key)

    async def asked(trusted: Certificate, port: int) -> int:
        context = ssl.create_default_context(cadata=trusted.certificate.decode())
        review = {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {"uid": "1", "object": manifest("dpd-s3")},
        }
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"https://127.0.0.1:{port}/validate",
                json=review,
                ssl=context,
                server_hostname="hook.system.svc",
            ) as answer,
        ):
            assert (await answer.json())["response"]["allowed"]
            return answer.status

    old, new = make("hook", "system", NOW), make("hook", "system", NOW)
    write(old)
    context = tls_context(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with serving(webhook_app(), "127.0.0.1", 0, context) as port:
        assert await asked(old, port) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await asked(new, port)
        write(new)
        context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
        assert await asked(new, port) == 200
