"""From one secret to all that protects a cluster: Pulsing's passphrase and Flight's certificates.

    root = scrypt(secret)                        slow on purpose, so that secrets cannot be guessed
    key for a purpose = HMAC-SHA256(root, purpose)

The key of the certificate authority follows from the secret alone, so that all processes have the
same; each has a certificate of its own, signed with it, and speaks only with those who have one.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOST_NAME = "persisting-torch"
SHORTEST_SECRET = 8

_SALT = b"persisting_torch cluster 1"
_VALID_FROM = datetime.datetime(2020, 1, 1)
_VALID_UNTIL = datetime.datetime(2120, 1, 1)
# The order of the curve P-256 (SEC 2, version 2.0, section 2.4.2).
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True)
class Credentials:
    """What one process needs to be part of a cluster: Pulsing's passphrase, and PEM for Flight."""

    passphrase: str = field(repr=False)
    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


@functools.cache
def credentials(secret: str) -> Credentials:
    """The credentials of this process in the cluster with this secret.

    Raises ValueError for a secret that is shorter than eight characters.
    """
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(
            f"the passphrase of a cluster needs at least {SHORTEST_SECRET} characters, got"
            f" {len(secret)}. Take some random words, the same on every node."
        )
    root = hashlib.scrypt(secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=32)
    authority_key = ec.derive_private_key(_number(root, b"authority"), ec.SECP256R1())
    authority = _authority(authority_key)
    own_key = ec.generate_private_key(ec.SECP256R1())
    own = _certificate(own_key.public_key(), authority, authority_key)
    return Credentials(
        passphrase=_key(root, b"pulsing").hex(),
        authority=authority.public_bytes(serialization.Encoding.PEM),
        certificate=own.public_bytes(serialization.Encoding.PEM),
        key=own_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _key(root: bytes, purpose: bytes) -> bytes:
    return hmac.digest(root, purpose, "sha256")


def _number(root: bytes, purpose: bytes) -> int:
    """A private key: a number from 1 to the curve's order less one, evenly spread."""
    wide = _key(root, purpose + b" 1") + _key(root, purpose + b" 2")
    return int.from_bytes(wide, "big") % (_ORDER - 1) + 1


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{HOST_NAME} authority")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    usage = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST_NAME)]))
        .issuer_name(authority.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST_NAME)]), critical=False)
        .add_extension(usage, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
