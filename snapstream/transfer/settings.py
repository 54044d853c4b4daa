"""Who may send rows to whom: the shared secret, the address where rows arrive, and TLS.

Invariant: an address that other machines reach is refused without TLS, on both sides; the secret comes from the
environment or from a file that nobody else can read, never from a command line.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from snapstream.config.addresses import is_loopback

SECRET_VARIABLE = "SNAPSTREAM_TRANSFER_SECRET"
MIN_SECRET_CHARS = 32


def read_secret(file: Path | None) -> bytes:
    """The secret of the file, or of the environment. ValueError where there is none, or others could read it."""
    if file is None:
        return _checked(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"{file} has mode {mode:04o}; a transfer secret must be readable by its owner only (0600)")
    return _checked(file.read_text(encoding="utf-8"), str(file))


def _checked(text: str, source: str) -> bytes:
    secret = text.strip()
    if not secret:
        raise ValueError(
            f"{source} holds no transfer secret; engines that send rows to each other need one of at least "
            f"{MIN_SECRET_CHARS} characters, in {SECRET_VARIABLE} or in --transfer-secret-file"
        )
    if len(secret) < MIN_SECRET_CHARS:
        raise ValueError(f"the transfer secret has {len(secret)} characters; it must have at least {MIN_SECRET_CHARS}")
    return secret.encode()


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """What an engine needs to send rows, and with ``host`` to receive some."""

    secret: bytes = field(repr=False)
    host: str | None = None  # where rows arrive, as senders reach it; None: none do
    port: int = 0  # 0 takes a free one
    cert: Path | None = None  # PEM files of this server; with them rows arrive over TLS
    key: Path | None = None
    ca: Path | None = None  # PEM file of the authorities that receivers' certificates must come from

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_CHARS:
            raise ValueError(
                f"the transfer secret has {len(self.secret)} bytes; it must have at least {MIN_SECRET_CHARS}"
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the transfer port is {self.port}; it must be a number from 0 to 65535")
        for file in (self.cert, self.key, self.ca):
            if file is not None and not file.is_file():
                raise ValueError(f"{file} is not a file")
        self._check_files()
        if self.host is None:
            return
        if _is_wildcard(self.host):
            raise ValueError(
                f"the transfer address is {self.host}, which no sender can reach; give the address of one interface"
            )
        if not is_loopback(self.host) and (self.cert is None or self.key is None):
            raise ValueError(
                f"the transfer address is {self.host}, which other machines reach; rows hold prompts, so this needs "
                "TLS: give --tls-cert and --tls-key, or a loopback address"
            )

    def _check_files(self) -> None:
        """ValueError for files that are no PEM: else the first row would find out."""
        try:
            if self.ca is not None:
                self.client_context()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.ca} holds no certificates of authorities (PEM): {error}") from None
        try:
            self.server_context()
            self.certificate_digest()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.cert} and {self.key} are no certificate and its key (PEM): {error}") from None

    def server_context(self) -> ssl.SSLContext | None:
        """Of the port where rows arrive."""
        if self.cert is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.cert, self.key)
        context.num_tickets = 0  # nobody resumes, and a sender that sees bytes shall find a frame
        return context

    def client_context(self) -> ssl.SSLContext:
        """Of a sender, and of whoever asks a prefill server: certificate and name are checked."""
        return ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))

    def certificate_digest(self) -> bytes:
        """Of this server's own certificate, the first of its file; empty without TLS."""
        if self.cert is None:
            return b""
        first = self.cert.read_text(encoding="ascii").partition("-----END CERTIFICATE-----")
        begin = first[0].index("-----BEGIN CERTIFICATE-----")
        return sha256(ssl.PEM_cert_to_DER_cert(first[0][begin:] + first[1] + "\n")).digest()


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return not host
