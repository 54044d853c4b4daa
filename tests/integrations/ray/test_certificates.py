"""Certificates of replicas hold a row's link together, and nothing else does."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress

import pytest

pytest.importorskip("cryptography")

from snapstream.disaggregation.protocol import TransferSettings
from snapstream.integrations.ray.certificates import as_file, certify, make_authority

SECRET = b"a secret of thirty-two characters"


def greet(receiver: TransferSettings, sender: TransferSettings, name: str) -> None:
    """A TLS handshake of the two, by the name that the sender expects. SSLError."""
    context = receiver.server_context()
    assert context is not None
    left, right = socket.socketpair()

    def answer() -> None:
        with suppress(OSError), context.wrap_socket(left, server_side=True) as wrapped:
            wrapped.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with right, sender.client_context().wrap_socket(right, server_hostname=name) as wrapped:
            wrapped.send(b"x")
    finally:
        right.close()
        thread.join()


def test_a_receiver_is_known_by_its_address_and_its_authority() -> None:
    authority, other = make_authority(), make_authority()
    own = certify(authority, "10.1.2.3")
    receiver = TransferSettings(
        secret=SECRET, host="10.1.2.3", cert=as_file("cert", own.certificate), key=as_file("key", own.key)
    )
    assert len(receiver.certificate_digest()) == 32
    sender = TransferSettings(secret=SECRET, ca=as_file("ca", authority.certificate))
    greet(receiver, sender, "10.1.2.3")
    with pytest.raises(ssl.SSLError, match="10.1.2.4"):
        greet(receiver, sender, "10.1.2.4")
    with pytest.raises(ssl.SSLError):
        greet(receiver, TransferSettings(secret=SECRET, ca=as_file("ca", other.certificate)), "10.1.2.3")
