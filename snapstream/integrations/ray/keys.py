"""What the replicas of a cluster share to send rows to each other: a secret, and an authority for certificates.

The first replica that asks makes both, and Ray's head keeps them (its key-value store) as long as the cluster lives, so
a redeployment replaces nothing, and replicas on other machines find them. Whoever can read them there can also run code
on every replica. Invariant: of two replicas that ask at once, both get the same. This file is all that touches that
store, whose API Ray calls experimental.
"""

from __future__ import annotations

import json
import secrets

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util import get_node_ip_address

from snapstream.integrations.ray.certificates import Identity, as_file, certify, make_authority
from snapstream.transfer.settings import TransferSettings

PLACE, SPACE = b"transfer-keys", b"snapstream"
SECRET_BYTES = 32


def sender_settings() -> TransferSettings:
    """Of a replica that sends rows. It blocks."""
    secret, authority = _shared()
    return TransferSettings(secret=secret, ca=as_file("rows-ca", authority.certificate))


def receiver_settings() -> TransferSettings:
    """Of a replica at which rows arrive: at its machine's address in the cluster, a free port, over TLS. It blocks."""
    secret, authority = _shared()
    host = get_node_ip_address()
    own = certify(authority, host)
    return TransferSettings(
        secret=secret, host=host, cert=as_file("rows-cert", own.certificate), key=as_file("rows-key", own.key)
    )


def _shared() -> tuple[bytes, Identity]:
    stored = _internal_kv_get(PLACE, namespace=SPACE)
    if stored is None:
        authority = make_authority()
        told = {
            "secret": secrets.token_hex(SECRET_BYTES),
            "certificate": authority.certificate.decode(),
            "key": authority.key.decode(),
        }
        _internal_kv_put(PLACE, json.dumps(told).encode(), overwrite=False, namespace=SPACE)
        stored = _internal_kv_get(PLACE, namespace=SPACE)  # another replica may have been first
    found = json.loads(stored)
    return found["secret"].encode(), Identity(found["certificate"].encode(), found["key"].encode())
