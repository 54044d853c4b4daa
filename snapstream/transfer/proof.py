"""Proof, for one HTTP request between engines, that its sender knows the transfer secret; the secret never travels.

The proof covers path and body, and stands in the head, with the body's digest: a stranger is refused before a byte of
the body is read. Who sees a proof can send the same request again; it holds a ticket, which is good once.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

HEADER = "x-snapstream-proof"  # digest of the body, and MAC of it and the path, both as hex


def proof_of(secret: bytes, path: str, body: bytes) -> str:
    """The header for a request."""
    digest = sha256(body).hexdigest()
    return f"{digest}:{_mac(secret, path, digest)}"


def digest_of(secret: bytes, path: str, header: str) -> str | None:
    """The digest that the body must have; None for a proof that is wrong or missing."""
    digest, _, mac = header.partition(":")
    is_right = hmac.compare_digest(mac.encode(), _mac(secret, path, digest).encode())
    return digest if is_right else None


def has_digest(body: bytes, digest: str) -> bool:
    return hmac.compare_digest(sha256(body).hexdigest(), digest)


def _mac(secret: bytes, path: str, digest: str) -> str:
    return hmac.digest(secret, f"snapstream http {path}\0{digest}".encode(), "sha256").hex()
