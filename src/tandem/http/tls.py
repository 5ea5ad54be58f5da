"""TLS of a server: its certificate and key, perhaps its clients' CAs, in files that may be replaced."""

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger("tandem.http")

_INTERVAL = 1.0
"""Seconds between two looks at the files."""

Seen = tuple[tuple[int, ...] | None, ...]
"""What tells one state of the files from another; None for one that is not there."""


class BadTls(ValueError):
    """Files that a server cannot speak TLS with; says which, and why."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. `certificate` holds the server's and those between it and its root; `client_ca`
    those of which clients must have one, None if they need none."""

    certificate: str
    key: str
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext:
        """What connections are wrapped with. Raises `BadTls`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        _check(self.certificate, b"CERTIFICATE-----", "certificate")
        _check(self.key, b"PRIVATE KEY-----", "private key")
        try:
            # OpenSSL would ask for a passphrase on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:
            raise BadTls(f"{self.certificate} and {self.key}: {_why(error)}") from None
        if self.client_ca is not None:
            _check(self.client_ca, b"CERTIFICATE-----", "certificate")
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise BadTls(f"{self.client_ca}: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def seen(self) -> Seen:
        """The state of the files now."""
        paths = [self.certificate, self.key, *([self.client_ca] if self.client_ca is not None else [])]
        return tuple(map(_state, paths))


class Tls:
    """The TLS of a server while it runs: new connections get `context`, those that are open keep theirs.

    There is a fresh context for each state of the files, so that no session of before is resumed: a client
    whose CA was taken out has to prove itself again.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises `BadTls`."""
        self._files = files
        self._taken = self._before = files.seen()
        self.context = files.context()

    def renew(self) -> bool:
        """Look at the files; where they have changed and stand still, take them. Returns whether it did.

        Raises `BadTls` for files that cannot be used, once for each state of them; the old ones are used on.
        """
        seen = self._files.seen()
        settled, self._before = seen == self._before, seen
        if seen == self._taken or not settled:
            return False
        self._taken = seen
        self.context = self._files.context()
        return True

    async def follow(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Renew for ever, and log what comes of it."""
        while True:
            await sleep(_INTERVAL)
            try:
                if await asyncio.to_thread(self.renew):
                    log.info(
                        "TLS: new connections get the certificate that is in %s now", self._files.certificate
                    )
            except BadTls as error:
                log.error("TLS: the new files cannot be used, those of before are used on: %s", error)


def _state(path: str) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _check(path: str, marker: bytes, what: str) -> None:
    """Raise for a file that cannot hold what it should: OpenSSL does not say which file it means."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise BadTls(f"{path} cannot be read: {error.strerror}") from None
    if marker not in content:
        raise BadTls(f"{path} holds no {what} in PEM (no line ends in {marker.decode()})")
    if b"ENCRYPTED" in content:
        raise BadTls(f"{path} is encrypted, and nobody is there to give the passphrase; store it without one")


def _why(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return f"OpenSSL cannot use this ({reason or error})"
