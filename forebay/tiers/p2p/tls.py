"""TLS for streams that leave the host, held together by the keys that peers have already.

The listener makes a key and a certificate for as long as its process lives; nobody has signed it and its names mean
nothing. Its fingerprint goes to a peer with Welcome, over the CURVE connection on which both have proved their keys,
along with the ticket. Who dials compares the fingerprint before it says a word, and so talks to the process that has
the listener's CURVE key; the ticket is said over that connection alone, so whoever shows it has been let in there.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from forebay.errors import ConfigError
from forebay.tiers.p2p.pipes import TlsPipe

LASTS = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Identity:
    """A listener's side: what takes connections, and the SHA-256 of its certificate."""

    context: ssl.SSLContext
    fingerprint: bytes


def new_identity() -> Identity:
    """A fresh key with its certificate; neither is written to any disk. Raises ConfigError without `cryptography`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError("p2p with bulk = \"tls\" takes cryptography: pip install forebay[p2p]") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "forebay")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - LASTS).not_valid_after(now + LASTS)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    _load(context, secret + certificate.public_bytes(pem))
    return Identity(context, sha256(certificate.public_bytes(serialization.Encoding.DER)).digest())


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """OpenSSL reads keys from files alone: this one is in memory."""
    descriptor = os.memfd_create("p2p-identity", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def dialling_context() -> ssl.SSLContext:
    """For `pinned`: no authority is asked, since the fingerprint says all."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pinned(connection: socket.socket, context: ssl.SSLContext, fingerprint: bytes, seconds: float) -> TlsPipe:
    """Shake hands with whoever has the key to the certificate of this fingerprint, within `seconds`.

    Closes the connection and raises ConnectionError with anybody else.
    """
    pipe = TlsPipe(connection, context, server=False)
    try:
        pipe.limit(seconds)
        pipe.shake()
        if not hmac.compare_digest(sha256(pipe.certificate).digest(), fingerprint):
            raise ConnectionError("the listener has another certificate than the peer's Welcome says")
    except BaseException:
        pipe.close()
        raise
    return pipe
