"""What the replicas of a cluster share to send rows to each other: a secret, and an authority for certificates.

The first replica that asks makes both and starts ``KeyKeeper``, a detached actor that outlives redeployments, so
replicas of later ones and on other machines find them. Whoever can ask it can also run code on every replica.
Invariants: of two replicas that ask at once, both get the same, because Ray gives a name away once; and a keeper that
dies is started again with the same, because Ray's head keeps what an actor was made with.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import ray
from ray.util import get_node_ip_address

from snapstream.integrations.ray.certificates import Identity, as_file, certify, make_authority
from snapstream.transfer.settings import TransferSettings

NAME, NAMESPACE = "transfer-keys", "snapstream"
SECRET_BYTES = 32
FOR_EVER = -1  # restarts, and calls that are made again


@dataclass(frozen=True)
class Keys:
    """Of one cluster."""

    secret: bytes
    authority: Identity


class KeyKeeper:
    """The actor; it does nothing but answer."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def keys(self) -> Keys:
        return self._keys


def sender_settings() -> TransferSettings:
    """Of a replica that sends rows. It blocks. RayError if the cluster has no keeper and can start none."""
    keys = _shared()
    return TransferSettings(secret=keys.secret, ca=as_file("rows-ca", keys.authority.certificate))


def receiver_settings() -> TransferSettings:
    """Of a replica at which rows arrive: at its machine's address in the cluster, a free port, over TLS.

    It blocks. RayError as above.
    """
    keys = _shared()
    host = get_node_ip_address()
    own = certify(keys.authority, host)
    return TransferSettings(
        secret=keys.secret, host=host, cert=as_file("rows-cert", own.certificate), key=as_file("rows-key", own.key)
    )


def _shared() -> Keys:
    made = Keys(secrets.token_hex(SECRET_BYTES).encode(), make_authority())  # in vain if there is a keeper
    keeper = ray.remote(KeyKeeper).options(
        name=NAME,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=FOR_EVER,
        max_task_retries=FOR_EVER,
    )
    found: Keys = ray.get(keeper.remote(made).keys.remote())
    return found
