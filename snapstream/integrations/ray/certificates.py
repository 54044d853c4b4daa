"""Secret and certificates for KV transfer between the replicas of a cluster.

The first replica makes a secret and a certificate authority and starts ``KeyKeeper``, a detached actor that outlives
redeployments, so that later replicas and other machines find them. A client that can call it can also run code on every
replica. Invariants: two replicas that ask at once get the same keys, because Ray gives out an actor's name once; and a
keeper that dies restarts with the same, because Ray's head keeps an actor's arguments. A certificate names one address
and is signed by the authority. Nothing is written to disk: ``as_file`` gives OpenSSL a file in memory.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from snapstream.disaggregation.protocol import TransferSettings

SKEW = timedelta(days=1)  # between the clocks of two machines
VALID = timedelta(days=3650)  # a cluster ends before


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes


def make_authority() -> Identity:
    """A new authority, which signs certificates of receivers and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("snapstream rows")
    built = (
        _begun(name, key.public_key())
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return _identity(built.sign(key, SHA256()), key)


def certify(authority: Identity, host: str) -> Identity:
    """A new key for the receiver at ``host``, a name or an address, with a certificate of the authority."""
    key, own = ec.generate_private_key(ec.SECP256R1()), load_pem_private_key(authority.key, None)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    built = (
        _begun(_name("snapstream replica"), key.public_key())
        .issuer_name(issuer.subject)
        .add_extension(x509.SubjectAlternativeName([_subject(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key()), critical=False)
    )
    return _identity(built.sign(own, SHA256()), key)


def as_file(name: str, data: bytes) -> Path:
    """A file with ``data`` that this process and its children can open, as long as this one lives. Linux only."""
    descriptor = os.memfd_create(name)
    os.write(descriptor, data)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _begun(name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _subject(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _identity(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Identity:
    return Identity(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


NAME, NAMESPACE = "transfer-keys", "snapstream"
SECRET_BYTES = 32
FOR_EVER = -1  # restarts, and calls that are made again


@dataclass(frozen=True)
class Keys:
    secret: bytes
    authority: Identity


class KeyKeeper:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def keys(self) -> Keys:
        return self._keys


def sender_settings() -> TransferSettings:
    """Settings of a replica that sends rows. Blocks. RayError if the cluster has no keeper and can start none."""
    keys = _shared()
    return TransferSettings(secret=keys.secret, ca=as_file("rows-ca", keys.authority.certificate))


def receiver_settings() -> TransferSettings:
    """Settings of a replica that receives rows: at its machine's address in the cluster, a free port, over TLS.

    It blocks. RayError as above.
    """
    from ray.util import get_node_ip_address

    keys = _shared()
    host = get_node_ip_address()
    own = certify(keys.authority, host)
    return TransferSettings(
        secret=keys.secret, host=host, cert=as_file("rows-cert", own.certificate), key=as_file("rows-key", own.key)
    )


def _shared() -> Keys:
    import ray  # certificates alone need no Ray

    made = Keys(secrets.token_hex(SECRET_BYTES).encode(), make_authority())  # discarded if there is a keeper
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
