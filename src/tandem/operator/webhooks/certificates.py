"""The webhooks' certificate: made and renewed by the operator, kept in a Secret that its replicas share."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.kube import ApiError, Client, Object
from tandem.kube import resources as kinds
from tandem.operator.control.owned import MANAGER

LIFE = timedelta(days=365)
RENEW_BEFORE = timedelta(days=60)
_SKEW = timedelta(hours=1)
"""Clocks of API servers may be behind."""


@dataclass(frozen=True)
class Certificate:
    """PEM; self-signed, so that it is its own authority."""

    certificate: bytes
    key: bytes
    previous: bytes = b""
    """The one before: replicas may still serve it, so API servers trust both."""

    @property
    def bundle(self) -> str:
        """The trusted certificates as API objects have them."""
        return base64.b64encode(self.certificate + self.previous).decode()

    def expires(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def names(self) -> set[str]:
        found = x509.load_pem_x509_certificate(self.certificate)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        return set(names.value.get_values_for_type(x509.DNSName))


def make(service: str, namespace: str, now: datetime, previous: bytes = b"") -> Certificate:
    """For the names by which an API server reaches the service."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tandem-operator")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + LIFE)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(n) for n in _names(service, namespace)]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        previous,
    )


async def shared(client: Client, secret: str, service: str, namespace: str, now: datetime) -> Certificate:
    """The certificate of the Secret; made where there is none, renewed where it soon ends or is for another
    name. Of replicas that do so at once one wins, and all use its. Raises KubeError."""
    while True:
        found = await client.get(kinds.SECRET, secret, namespace)
        current = _read(found)
        if (
            current
            and current.expires() - now > RENEW_BEFORE
            and _names(service, namespace) <= current.names()
        ):
            return current
        fresh = make(service, namespace, now, current.certificate if current else b"")
        try:
            if found is None:
                await client.create(_secret(secret, namespace, fresh), kinds.SECRET, manager=MANAGER)
            else:
                changed = found | {"data": _secret(secret, namespace, fresh)["data"]}
                await client.replace(changed, kinds.SECRET, manager=MANAGER)
        except ApiError as error:
            if error.conflict:
                continue
            raise
        return fresh


def _names(service: str, namespace: str) -> set[str]:
    return {f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"}


def _secret(name: str, namespace: str, made: Certificate) -> Object:
    data = {"tls.crt": made.certificate, "tls.key": made.key, "previous.crt": made.previous}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/name": "tandem"},
        },
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def _read(secret: Object | None) -> Certificate | None:
    """None where there is nothing usable."""
    data = (secret or {}).get("data") or {}
    try:
        parts = [base64.b64decode(data.get(name, "")) for name in ("tls.crt", "tls.key", "previous.crt")]
        made = Certificate(*parts)
        made.expires()
        serialization.load_pem_private_key(made.key, None)
    except ValueError:
        return None
    return made
