"""What two engines agree on before a KV transfer: secret, address, TLS, the request for a prefill, the header of a row.

    sender    HEADER  LAYER 0  LAYER 1 ... LAYER L-1  HIDDEN_STATE  REPORT      HEARTBEAT anywhere between two frames
    receiver                                              RECEIVED              or REFUSED with a reason, at any moment

A LAYER frame holds one layer of the row, kv head after kv head: scales if it has any, then keys and values of the slots
up to ``min(N, C)``, with the head's own C where budgets are per head; of a recurrent layer its state after the prompt.
HIDDEN_STATE is the prompt's last hidden state, from which the receiver samples the first tokens; REPORT says what
compression did. Frames, codec and handshake are those of ``snapstream/wire.py``.

Invariants: the receiver knows the size of every frame but the report before it comes, because the header must equal the
one that it expects. An address that other machines reach is refused without TLS, on both sides; the secret comes from
the environment or from a file that only its owner can read, never from a command line.

The decode engine sends its request over HTTP, with only the sampling parameters that concern the prompt: tokens are
sampled where the row arrives. A request from a peer is checked as any request is, and names a selector and its
settings, but no code. The proof that its sender knows the secret is in a header, so that a client without it is refused
before a byte of the body is read; it covers path and body. A replayed request is harmless: its ticket is valid once.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from snapstream.config import SELECTORS, KVBudget, Selector
from snapstream.config.values import is_loopback, read_text
from snapstream.types import Request, RowTicket, SamplingParams
from snapstream.wire import WireError, mac, pack, unpack_one

MAX_HEADER_BYTES = 16 * 2**10
DEADLINE_S = 30.0  # without a byte or a heartbeat
HEARTBEAT_S = 5.0  # between two frames of a sender that has nothing to send
PURPOSE = b"kv transfer"  # of the handshake
SECRET_VARIABLE = "SNAPSTREAM_TRANSFER_SECRET"
MIN_SECRET_CHARS = 32


def read_secret(file: Path | None) -> bytes:
    """The secret from the file, or from the environment. ValueError if there is none, or if others could read it."""
    if file is None:
        return _checked(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"{file} has mode {mode:04o}; a transfer secret must be readable by its owner only (0600)")
    return _checked(read_text(file), str(file))


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
    """What an engine needs to send rows, and with ``host`` to receive them."""

    secret: bytes = field(repr=False)
    host: str | None = None  # where this engine receives rows, as senders reach it; None: it only sends
    port: int = 0  # 0 takes a free one
    cert: Path | None = None  # PEM files of this server; with them rows are received over TLS
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
        """ValueError for files that are not PEM, at start rather than with the first row."""
        try:
            if self.ca is not None:
                self.client_context()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.ca} holds no certificates of authorities (PEM): {error}") from None
        try:
            self.server_context()
            self.certificate_digest()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.cert} and {self.key} are not a certificate and its key (PEM): {error}") from None

    def server_context(self) -> ssl.SSLContext | None:
        """TLS context of the receiver; None without TLS."""
        if self.cert is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.cert, self.key)
        context.num_tickets = 0  # sessions are not resumed, and readable bytes must be a frame
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS context of a sender, or of a client of a prefill server; certificate and host name are checked."""
        return ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))

    def certificate_digest(self) -> bytes:
        """SHA-256 of this server's certificate, the first in its file; empty without TLS."""
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


def check_fingerprints(own: Mapping[str, str], theirs: Mapping[str, str], who: str) -> None:
    """WireError, naming the first fact and both values, for engines whose rows differ."""
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            other = str(theirs.get(name))[:200]
            raise WireError(f"the engines differ: {name} is {own.get(name)} here and {other} at {who}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Bytes of the frames of a row."""

    num_layers: int
    num_kv_heads: int = 1  # where layers differ, the most
    hidden_bytes: int  # the last hidden state
    # Of each layer of a row, by the prompt's length and the budget.
    layer_bytes: Callable[[int, KVBudget], tuple[int, ...]]

    def row_bytes(self, prompt_len: int, budget: KVBudget) -> int:
        """Host memory that the row takes on either side during the transfer."""
        return sum(self.layer_bytes(prompt_len, budget)) + self.hidden_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHeader:
    """Describes the row to be sent. Both sides make one, and they must be equal."""

    fingerprint: Mapping[str, str]  # properties of the engine that rows depend on, by name
    prompt_len: int
    budget: KVBudget
    num_layers: int
    layer_bytes: tuple[int, ...]
    hidden_bytes: int

    @classmethod
    def of(cls, fingerprint: Mapping[str, str], sizes: RowSizes, prompt_len: int, budget: KVBudget) -> RowHeader:
        return cls(
            fingerprint=fingerprint,
            prompt_len=prompt_len,
            budget=budget,
            num_layers=sizes.num_layers,
            layer_bytes=sizes.layer_bytes(prompt_len, budget),
            hidden_bytes=sizes.hidden_bytes,
        )

    def check(self, sent: RowHeader) -> None:
        """WireError, with both values, unless what was sent is the row that is expected."""
        check_fingerprints(self.fingerprint, sent.fingerprint, "the sender")
        for name in ("prompt_len", "num_layers", "hidden_bytes", "budget", "layer_bytes"):
            own, theirs = getattr(self, name), getattr(sent, name)
            if own != theirs:
                raise WireError(f"{name} is {str(theirs)[:200]}; the row of this ticket has {str(own)[:200]}")


HEADER = "x-snapstream-proof"  # digest of the body, and MAC of it and the path, both as hex


def proof_of(secret: bytes, path: str, body: bytes) -> str:
    """The header for a request."""
    digest = sha256(body).hexdigest()
    return f"{digest}:{_mac(secret, path, digest)}"


def digest_of(secret: bytes, path: str, header: str) -> str | None:
    """The digest that the body must have; None for a proof that is wrong or missing."""
    digest, _, found = header.partition(":")
    is_right = hmac.compare_digest(found.encode(), _mac(secret, path, digest).encode())
    return digest if is_right else None


def has_digest(body: bytes, digest: str) -> bool:
    return hmac.compare_digest(sha256(body).hexdigest(), digest)


def _mac(secret: bytes, path: str, digest: str) -> str:
    return mac(secret, b"http", f"{path}\0{digest}".encode()).hex()


def prefill_request(request: Request, ticket: RowTicket, budget: KVBudget, selector: Selector) -> Request:
    """The request for a prefill engine, which sends the row to ``ticket``.

    ``budget``, ``selector``: this engine's, if the request names none; those of the other may differ. Its id follows
    from the ticket, because ids of several decode engines may be equal; it is not the ticket's key, which no log may
    show.
    """
    return Request(
        request_id=f"prefill-{sha256(ticket.key.encode()).hexdigest()[:32]}",
        prompt_token_ids=request.prompt_token_ids,
        sampling=SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=request.sampling.prompt_logprobs,
            return_kept=request.sampling.return_kept,
        ),
        budget=request.budget or budget,
        selector=request.selector or selector,
        priority=request.priority,
        namespace=request.namespace,
        ticket=ticket,
    )


def request_to_bytes(request: Request) -> bytes:
    """A request made by ``prefill_request``. ValueError for a selector that other processes do not know."""
    selector = request.selector
    assert selector is not None
    if selector.name not in SELECTORS or type(selector) is not SELECTORS.get(selector.name):
        raise ValueError(f"selector {selector.name!r} is not in SELECTORS, so it cannot be sent to another engine")
    return pack(request)


def request_from_bytes(data: bytes | bytearray) -> Request:
    """WireError for anything but what ``request_to_bytes`` writes; keeps what ``prefill_request`` keeps."""
    request = unpack_one(data, Request)
    if request.ticket is None or request.budget is None or request.selector is None:
        raise WireError("the request must have a ticket, a budget and a selector")
    return prefill_request(request, request.ticket, request.budget, request.selector)
