"""A chunk's stored bytes, compressed and encrypted as a tier's options say: pure functions over buffers.

    encode(block, payload)          -> [envelope | header block | payload] as bytes to store
    decode(stored, payload buffer)  -> header block; the payload lies in the buffer
    front(first bytes of stored)    -> header block, without reading the rest

What comes back is what was given, to the last bit, so a chunk still describes and checks itself: callers verify the
payload by its header's checksums as they do for a chunk that was stored plainly. Plain chunks, [header | payload],
are understood as well, so a tier's options may change over a full directory; except by a tier that encrypts.

Without a key one can see of an encrypted chunk: its group and chain key (they are its name as well), its length, how
well it compressed, and which key it needs. A chain key is a hash of all tokens up to the chunk's end, the namespace
and the tenant's salt: whoever can guess all of a prompt can check the guess.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from forebay.errors import ConfigError, CorruptChunk
from forebay.kvstore.header import HEADER_BYTES_MAX, ChunkHeader, decode_header, header_bytes
from forebay.tiers.base import ChunkId
from forebay.tiers.chunks import stored_header
from forebay.tiers.codec.envelope import (
    ENVELOPE_BYTES,
    KEY_ID_BYTES,
    SALT_BYTES,
    Compression,
    Encryption,
    Envelope,
    check_header_part,
    check_payload_part,
    decode_envelope,
    encode_envelope,
    is_enveloped,
)
from forebay.tiers.codec.errors import MissingKey, MissingLibrary, UnsealedChunk
from forebay.tiers.codec.keys import Key, KeyRing, load_keys
from forebay.tiers.codec.planes import Compressor, Packed
from forebay.tiers.codec.seal import HEADER_PART, PAYLOAD_PART, TAG_BYTES, new_salt, require_cipher, seal, unseal

FRONT_BYTES = 4096
"""So many first bytes hold the front of nearly every chunk. `front_length` tells how many it takes."""


_BODY_AT = 36


@dataclass(frozen=True, slots=True)
class Front:
    """What a stored chunk's first bytes say. `block` is its header block, as it was given to `encode`."""

    header: ChunkHeader
    block: bytes
    stored_length: int
    sealed: bool


class Codec:
    """Encodes as configured, decodes whatever it meets. May be used by several threads."""

    def __init__(
        self, *, compress: bool = False, keys: KeyRing | None = None, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`keys`: encrypt, and accept only what is encrypted. Raises MissingLibrary if it takes a package that isn't
        there. `random` gives bytes for salts."""
        self._compress = compress
        self._compressor = Compressor() if compress else None  # else made when a compressed chunk is met
        self._keys = keys
        self._random = random
        if keys is not None:
            require_cipher()

    @property
    def active(self) -> bool:
        """Does `encode` change anything? If not, chunks may as well be stored plainly."""
        return self._compress or self._keys is not None

    @property
    def sealing(self) -> bool:
        """Does it encrypt, and refuse what isn't encrypted?"""
        return self._keys is not None

    # --- storing ---------------------------------------------------------------------------------------

    def stored_bytes_max(self, block_length: int, payload_length: int) -> int:
        """`encode` never makes more of a chunk than this."""
        return ENVELOPE_BYTES + block_length + payload_length + 2 * TAG_BYTES

    def encode(self, block: bytes, payload: memoryview, out: memoryview | None = None) -> memoryview:
        """The bytes to store for a chunk: the front of `out`, if given, which must have `stored_bytes_max`.

        `block` is the padded header block with the slot's own fields reset, as `checked_slot` gives it.
        """
        header = decode_header(block)
        packed = self._packer().compress(payload) if self._compress else Packed(Compression.NONE, payload)
        bare = block.rstrip(b"\0")
        key = self._keys.writing if self._keys else None
        tag = TAG_BYTES if key else 0
        envelope = Envelope(
            packed.how,
            Encryption.AES_256_GCM if key else Encryption.NONE,
            ChunkId(header.group, header.key),
            key.id if key else bytes(KEY_ID_BYTES),
            new_salt(self._random) if key else bytes(SALT_BYTES),
            len(block), len(bare) + tag, len(payload), len(packed.data) + tag,
        )  # fmt: skip
        whole = memoryview(bytearray(envelope.stored_length)) if out is None else out[: envelope.stored_length]
        assert len(whole) == envelope.stored_length, "the buffer must have stored_bytes_max"
        header_part = whole[ENVELOPE_BYTES : envelope.front_length]
        payload_part = whole[envelope.front_length :]
        _put(key, envelope, HEADER_PART, bare, header_part)
        _put(key, envelope, PAYLOAD_PART, packed.data, payload_part)
        digest = xxhash.xxh3_64_intdigest
        summed = replace(envelope, header_sum=digest(header_part), payload_sum=digest(payload_part))
        whole[:ENVELOPE_BYTES] = encode_envelope(summed)
        return whole

    # --- loading ---------------------------------------------------------------------------------------

    def front(self, first: bytes | memoryview) -> Front:
        """The header block in the first bytes of a stored chunk, at least `front_length(first)` of them.

        Raises CorruptChunk (ForeignChunk, UnsealedChunk), MissingKey.
        """
        first = memoryview(first)
        if not is_enveloped(first):
            return self._plain_front(first)
        envelope = decode_envelope(first)
        block = self._block(envelope, first)
        return Front(
            self._checked(envelope, block), block, envelope.stored_length, envelope.encryption is not Encryption.NONE
        )

    def decode(self, stored: bytes | memoryview, payload: memoryview) -> Front:
        """All of a stored chunk: its front is returned, its payload lies in the front of `payload`, which isn't
        touched behind that. The caller compares the header with what it wanted, and verifies the payload.

        Raises CorruptChunk (ForeignChunk, UnsealedChunk), MissingKey, MissingLibrary; what `payload` holds is then
        of no use.
        """
        stored = memoryview(stored)
        found = self.front(stored)
        length = found.header.payload_length
        if length > len(payload):
            raise CorruptChunk(f"payload of {length} bytes, the slot takes {len(payload)}")
        target = payload[:length]
        if is_enveloped(stored):
            envelope = decode_envelope(stored)
            self._restore(envelope, check_payload_part(envelope, stored), target)
            return found
        if len(stored) != found.stored_length:
            raise CorruptChunk(f"{len(stored)} stored bytes, the header says {found.stored_length}")
        target[:] = stored[len(found.block) :]
        return found

    def _plain_front(self, first: memoryview) -> Front:
        told = decode_header(first)
        block = bytes(first[: header_bytes(told.token_count, len(told.extra))])
        header = stored_header(block)
        if self.sealing:
            raise UnsealedChunk("the chunk isn't encrypted, and this tier takes only what is")
        return Front(header, block, len(block) + header.payload_length, False)

    def _block(self, envelope: Envelope, first: memoryview) -> bytes:
        part = check_header_part(envelope, first)
        key = self._key(envelope)
        if key is None:
            bare = bytes(part)
        else:
            clear = bytearray(_clear_length(envelope.header_stored))
            unseal(key, envelope, HEADER_PART, part, memoryview(clear))
            bare = bytes(clear)
        if len(bare) > envelope.header_length:
            raise CorruptChunk(f"header of {len(bare)} bytes, the envelope says {envelope.header_length}")
        return bare.ljust(envelope.header_length, b"\0")

    def _checked(self, envelope: Envelope, block: bytes) -> ChunkHeader:
        header = stored_header(block)
        if ChunkId(header.group, header.key) != envelope.chunk:
            raise CorruptChunk("the header is another chunk's than the envelope says")
        if header.payload_length != envelope.payload_length:
            raise CorruptChunk(f"payload of {header.payload_length} bytes, the envelope says {envelope.payload_length}")
        return header

    def _key(self, envelope: Envelope) -> Key | None:
        """The key that opens the chunk, None if it is open."""
        if envelope.encryption is Encryption.NONE:
            if self.sealing:
                raise UnsealedChunk("the chunk isn't encrypted, and this tier takes only what is")
            return None
        key = self._keys.get(envelope.key_id) if self._keys else None
        if key is None:
            raise MissingKey(f"the chunk is encrypted under key {envelope.key_id.hex()}, which isn't here")
        return key

    def _restore(self, envelope: Envelope, part: memoryview, payload: memoryview) -> None:
        key = self._key(envelope)
        packed = envelope.compression is not Compression.NONE
        clear = part
        if key is not None:
            length = _clear_length(envelope.payload_stored)
            if not packed and length != len(payload):
                raise CorruptChunk(f"{length} bytes for a payload of {len(payload)}")
            clear = memoryview(bytearray(length)) if packed else payload
            unseal(key, envelope, PAYLOAD_PART, part, clear)
        if packed:
            self._packer().restore(clear, envelope.compression, payload)
        elif key is None:
            if len(part) != len(payload):
                raise CorruptChunk(f"{len(part)} bytes for a payload of {len(payload)}")
            payload[:] = part

    def _packer(self) -> Compressor:
        if self._compressor is None:
            self._compressor = Compressor()
        return self._compressor


def front_length(first: bytes | memoryview) -> int:
    """How many of a stored chunk's first bytes `front` takes, as far as `first` tells: if that is more than `first`,
    ask again with so many. Raises CorruptChunk if no chunk begins here. `FRONT_BYTES` are nearly always enough."""
    if is_enveloped(first):
        return decode_envelope(first).front_length
    unpadded = _BODY_AT + int.from_bytes(first[_BODY_AT - 4 : _BODY_AT], "little")
    if len(first) < unpadded <= HEADER_BYTES_MAX:
        return unpadded
    told = decode_header(first)
    return header_bytes(told.token_count, len(told.extra))


def check_sealed(stored: bytes | memoryview) -> Envelope:
    """Is an enveloped chunk unharmed, as far as that can be told without its key? Raises CorruptChunk if not."""
    stored = memoryview(stored)
    envelope = decode_envelope(stored)
    check_header_part(envelope, stored)
    check_payload_part(envelope, stored)
    return envelope


def open_codec(name: str, compress: str, encrypt_key_file: str) -> Codec:
    """The codec that a tier's options `compress` ("none" or "zstd") and `encrypt_key_file` (empty: none; a file, or
    a directory of keys) ask for. Raises ConfigError that names the tier, the option and the remedy."""
    if compress not in ("none", "zstd"):
        raise ConfigError(f"tier {name!r}: compress {compress!r} must be none or zstd")
    if encrypt_key_file and not Path(encrypt_key_file).is_absolute():
        raise ConfigError(f"tier {name!r}: encrypt_key_file {encrypt_key_file!r} must be an absolute path")
    try:
        return Codec(
            compress=compress == "zstd", keys=load_keys(name, Path(encrypt_key_file)) if encrypt_key_file else None
        )
    except MissingLibrary as error:
        raise ConfigError(f"tier {name!r}: {error}") from error


def _clear_length(sealed: int) -> int:
    if sealed < TAG_BYTES:
        raise CorruptChunk(f"an encrypted part of {sealed} bytes")
    return sealed - TAG_BYTES


def _put(key: Key | None, envelope: Envelope, part: int, data: bytes | memoryview, out: memoryview) -> None:
    if key is None:
        out[:] = data
    else:
        seal(key, envelope, part, data, out)
