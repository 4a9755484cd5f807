"""From one secret follows all that protects a cluster; from another one, nothing of it."""

from __future__ import annotations

import pickle

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from persisting_torch.cluster.secret import credentials
from tests.cluster.processes import running

SECRET = "four words of wisdom"

TELL = """
from persisting_torch.cluster.secret import credentials
own = credentials(sys.argv[1])
say([own.passphrase, own.authority.decode(), own.certificate.decode(), own.key.decode()])
"""


def authority_key(pem):
    return x509.load_pem_x509_certificate(pem).public_key().public_numbers()


def test_another_process_has_the_same_authority_and_a_certificate_of_its_own():
    own = credentials(SECRET)
    with running(TELL, SECRET) as other:
        passphrase, authority, certificate, key = other.said()
    assert passphrase == own.passphrase
    assert authority_key(authority.encode()) == authority_key(own.authority)
    assert certificate.encode() != own.certificate
    assert key.encode() != own.key
    x509.load_pem_x509_certificate(certificate.encode()).verify_directly_issued_by(
        x509.load_pem_x509_certificate(own.authority)
    )


def test_another_secret_has_nothing_in_common():
    own, other = credentials(SECRET), credentials(SECRET + ".")
    assert own.passphrase != other.passphrase
    assert authority_key(own.authority) != authority_key(other.authority)
    with pytest.raises(InvalidSignature):
        x509.load_pem_x509_certificate(other.certificate).verify_directly_issued_by(
            x509.load_pem_x509_certificate(own.authority)
        )


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="at least 8 characters, got 7"):
        credentials("1234567")


def test_no_key_is_printed():
    own = credentials(SECRET)
    shown = repr(own)
    assert SECRET not in shown
    assert own.passphrase not in shown
    assert "PRIVATE" not in shown


def test_credentials_go_to_other_processes():
    own = credentials(SECRET)
    assert pickle.loads(pickle.dumps(own)) == own


def test_the_authority_signs_nothing_below_another_authority():
    own = credentials(SECRET)
    root = x509.load_pem_x509_certificate(own.authority)
    leaf = x509.load_pem_x509_certificate(own.certificate)
    limits = root.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert limits.ca
    assert limits.path_length == 0
    with pytest.raises(x509.ExtensionNotFound):
        leaf.extensions.get_extension_for_class(x509.BasicConstraints)
