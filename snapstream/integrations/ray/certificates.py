"""Certificates for rows that travel between replicas: one authority of a cluster, and a certificate per receiver.

Users make none: replicas come and go at addresses that nobody knows before. Invariant: a certificate names one address,
and only the authority's own key has signed it. Nothing lies on a disk: ``as_file`` gives OpenSSL a file in memory that
ends with the process. No ray. ``keys.py`` hands the authority out.
"""

from __future__ import annotations

import os
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
