"""Certificates for tests: an authority, and what it signs."""

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def key_pem(self, passphrase: bytes | None = None) -> bytes:
        how: KeySerializationEncryption = (
            BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        )
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """The paths of its two files."""
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_bytes(self.pem)
        key.write_bytes(self.key_pem())
        return str(certificate), str(key)


class Authority:
    def __init__(self, name: str) -> None:
        self.own = _make(name, None)

    def sign(self, name: str) -> Pair:
        """A pair for a host of this name."""
        return _make(name, self.own)

    def client(self, folder: Path | None = None, pair: Pair | None = None) -> ssl.SSLContext:
        """A context of clients that trust this authority, and have a certificate of their own where one is
        given."""
        context = ssl.create_default_context(cadata=self.own.pem.decode())
        if pair is not None:
            assert folder is not None
            context.load_cert_chain(*pair.write(folder, "client"))
        return context


def _make(name: str, issuer: Pair | None) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    signer = issuer.key if issuer else key
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    return Pair(builder.sign(signer, hashes.SHA256()), key)
