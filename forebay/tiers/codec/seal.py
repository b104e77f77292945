"""AES-256-GCM under a key of each chunk's own.

    chunk's key = HMAC-SHA256(key file's secret, "forebay/codec/1\\0" + salt), salt: 32 random bytes
    header block: nonce 0; payload: nonce 1; both authenticate the envelope

Why not one key and random nonces: GCM fails completely when a nonce repeats, 96 random bits allow some 2^32 chunks
a key, and nobody could count them, since several stores may share a key file. With 256 random bits in the key's
derivation there is nothing to count, and each derived key sees exactly two nonces.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.errors import CorruptChunk
from forebay.tiers.codec.envelope import SALT_BYTES, Envelope
from forebay.tiers.codec.errors import MissingLibrary
from forebay.tiers.codec.keys import Key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TAG_BYTES = 16
HEADER_PART, PAYLOAD_PART = 0, 1

Random = Callable[[int], bytes]


def require_cipher() -> None:
    """Raises MissingLibrary if the package isn't there."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise MissingLibrary("this tier's chunks are encrypted; pip install 'forebay[encrypt]'") from error


def new_salt(random: Random = os.urandom) -> bytes:
    """A salt that no other chunk has."""
    return random(SALT_BYTES)


def seal(key: Key, envelope: Envelope, part: int, plain: bytes | memoryview, out: memoryview) -> None:
    """Encrypt one part of the chunk into `out`, which is `TAG_BYTES` longer than it."""
    _cipher(key, envelope.salt).encrypt_into(_nonce(part), plain, envelope.said(), out)


def unseal(key: Key, envelope: Envelope, part: int, sealed: memoryview, out: memoryview) -> None:
    """Decrypt one part into `out`, which is `TAG_BYTES` shorter than it. Raises CorruptChunk unless both the part and
    all that the envelope says are what was sealed; `out` then holds nothing of use."""
    from cryptography.exceptions import InvalidTag

    try:
        _cipher(key, envelope.salt).decrypt_into(_nonce(part), sealed, envelope.said(), out)
    except InvalidTag as error:
        raise CorruptChunk("the chunk isn't what was sealed (its tag differs)") from error


def _nonce(part: int) -> bytes:
    return part.to_bytes(12, "little")


def _cipher(key: Key, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(hmac.digest(key.secret, b"forebay/codec/1\0" + salt, "sha256"))
