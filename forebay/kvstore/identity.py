"""What makes two chunks the same: namespaces and the chain of chunk keys.

A *namespace* is everything that changes KV bytes for all requests. A *unit* is `MATCH_UNIT` tokens. Every unit
boundary of a prompt has a key, chained from chunk start to chunk start:

    root     = SHA256(domain "root",   namespace id, salt)
    key[p]   = SHA256(domain "chunk",  key[s], extra, token ids [s, p) as u32 LE)

where s is the chunk start before p: the greatest multiple of the namespace's `chunk_tokens` below p.

    tokens   0 ......... s=256 ........ p=304 ............. 512
             root        key[256]       key[304]            key[512]
             |---chunk---|---tail-------|
                         |---the chunk that it grows into---|

A chunk covers tokens [s, end) and has the key at `end`; its parent is the key at s. So a sealed chunk costs one
hash, and device blocks (one unit), sealed chunks, tails of any length and KV events all speak of the same keys,
none of which is ever computed from another engine's hash, a name, or a per-process seed.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import sys
from collections.abc import Sequence

import msgspec

from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry, check_group

__all__ = [
    "KEY_BYTES",
    "LAYOUT_VERSION",
    "MATCH_UNIT",
    "MAX_TOKEN_ID",
    "NAMESPACE_BYTES_MAX",
    "NAMESPACE_VERSION",
    "Chain",
    "GroupGeometry",
    "Namespace",
    "chain",
    "check_namespace",
    "chunk_key",
    "chunk_keys",
    "decode_namespace",
    "encode_namespace",
    "encoded_namespace_id",
    "pack_tokens",
    "root_key",
    "tenant_salt",
    "unpack_tokens",
]

KEY_BYTES = 32
NAMESPACE_VERSION = 2
LAYOUT_VERSION = 1
MAX_TOKEN_ID = 2**32 - 1
NAMESPACE_BYTES_MAX = 1 << 16
"""Of an encoded namespace: a store keeps many, in its own memory and beside its pool."""

_NAMESPACE_DOMAIN = b"forebay/namespace/1\0"
_ROOT_DOMAIN = b"forebay/root/1\0"
_PARTY_DOMAIN = b"forebay/party/1\0"
_CHUNK_DOMAIN = b"forebay/chunk/1\0"
_SALT_DOMAIN = b"forebay/salt/1\0"


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that changes KV bytes for all requests. Any difference is another namespace, so a miss.

    `weights` is a fingerprint of the checkpoint's contents (a name proves nothing); `epoch` is bumped by
    an update in place; `compute` names the arithmetic (a bf16 and an fp32 run differ in their KV); `positions`
    holds rope and position settings as sorted (name, value) pairs.
    """

    weights: bytes
    groups: tuple[GroupGeometry, ...]
    chunk_tokens: int = 256
    epoch: int = 0
    compute: str = "bfloat16"
    quantisation: str = "none"
    positions: tuple[tuple[str, str], ...] = ()
    match_unit: int = MATCH_UNIT
    hash: str = "sha256"
    layout_version: int = LAYOUT_VERSION
    version: int = NAMESPACE_VERSION

    @property
    def id(self) -> bytes:
        """32 bytes that stand for the whole struct."""
        return encoded_namespace_id(encode_namespace(self))

    def group_index(self, name: str) -> int:
        """Position of the group called `name`. Raises KeyError."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        raise KeyError(name)


def encoded_namespace_id(encoded: bytes) -> bytes:
    """The id of a namespace from its canonical encoding, whatever version that is of."""
    return hashlib.sha256(_NAMESPACE_DOMAIN + encoded).digest()


def encode_namespace(namespace: Namespace) -> bytes:
    """The canonical encoding: msgpack of the fields in their declared order."""
    return msgspec.msgpack.encode(namespace)


def decode_namespace(data: bytes) -> Namespace:
    """The inverse of `encode_namespace`. Raises ValueError on anything that isn't one, with the reason."""
    if len(data) > NAMESPACE_BYTES_MAX:
        raise ValueError(f"a namespace of {len(data)} bytes is over {NAMESPACE_BYTES_MAX}")
    try:
        namespace = msgspec.msgpack.decode(data, type=Namespace)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a namespace: {error}") from error
    refusal = check_namespace(namespace)
    if refusal:
        raise ValueError(refusal)
    return namespace


def check_namespace(namespace: Namespace) -> str | None:
    """Why this namespace can't be served by this version, or None."""
    wanted = (NAMESPACE_VERSION, LAYOUT_VERSION, MATCH_UNIT, "sha256")
    found = (namespace.version, namespace.layout_version, namespace.match_unit, namespace.hash)
    if found != wanted:
        return f"(version, layout, match unit, hash) is {found}, this store speaks {wanted}"
    if not 0 < namespace.chunk_tokens <= 65536 or namespace.chunk_tokens % MATCH_UNIT:
        return f"chunk_tokens {namespace.chunk_tokens} is not a multiple of {MATCH_UNIT} up to 65536"
    if not 0 < len(namespace.weights) <= 64:
        return f"weights fingerprint has {len(namespace.weights)} bytes, expected 1 to 64"
    if not 0 < len(namespace.groups) <= 16:
        return f"{len(namespace.groups)} cache groups, expected 1 to 16"
    if len({group.name for group in namespace.groups}) != len(namespace.groups):
        return "two cache groups have the same name"
    return next((why for why in map(check_group, namespace.groups) if why), None)


def root_key(namespace_id: bytes, salt: bytes = b"") -> bytes:
    """Where a tenant's chain begins. Different salts share nothing."""
    assert len(namespace_id) == KEY_BYTES, len(namespace_id)
    return hashlib.sha256(_ROOT_DOMAIN + namespace_id + salt).digest()


def party_of(group: bytes) -> bytes:
    """The name in which connections of a group reserve what they write together; 16 bytes, as a client's."""
    return hashlib.sha256(_PARTY_DOMAIN + group).digest()[:16]


def tenant_salt(tenant_secret: bytes, cache_salt: str) -> bytes:
    """The salt of one tenant's requests: it can't be produced by a request body alone."""
    return hmac.new(tenant_secret, _SALT_DOMAIN + cache_salt.encode(), hashlib.sha256).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little endian. Raises OverflowError for an id outside [0, 2**32)."""
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in the tests
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    assert len(data) % 4 == 0, len(data)
    packed = array.array("I", bytes(data))
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return tuple(packed)


def _opening(parent: bytes, extra: bytes) -> bytes:
    """What a chunk's tokens are hashed behind. `extra` has its length before it, so no token is taken for it."""
    assert len(parent) == KEY_BYTES, len(parent)
    return _CHUNK_DOMAIN + parent + len(extra).to_bytes(4, "little") + extra


def chunk_key(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """Key of the chunk of `tokens` (u32 LE, whole units) that begins where `parent` ends."""
    assert tokens and len(tokens) % (4 * MATCH_UNIT) == 0, len(tokens)
    return hashlib.sha256(_opening(parent, extra) + tokens).digest()


def chain(parent: bytes, tokens: bytes, extra: bytes = b"") -> list[bytes]:
    """Keys at the end of each whole unit of `tokens` (u32 LE), which are of one chunk that begins at `parent`.

    A rest below a unit has no key.
    """
    state = hashlib.sha256(_opening(parent, extra))
    step = 4 * MATCH_UNIT
    keys: list[bytes] = []
    for at in range(0, len(tokens) - step + 1, step):
        state.update(tokens[at : at + step])
        keys.append(state.copy().digest())
    return keys


def chunk_keys(root: bytes, tokens: bytes, chunk_tokens: int, extra: bytes = b"") -> bytes:
    """The keys, joined, at the ends of a prompt's chunks: each whole one, and the open one's last whole unit."""
    size, sha256, domain = 4 * chunk_tokens, hashlib.sha256, _CHUNK_DOMAIN
    whole = tokens[: len(tokens) // (4 * MATCH_UNIT) * (4 * MATCH_UNIT)]
    suffix = len(extra).to_bytes(4, "little") + extra
    parent, keys = root, []
    for chunk in [suffix + whole[at : at + size] for at in range(0, len(whole), size)]:
        parent = sha256(domain + parent + chunk).digest()
        keys.append(parent)
    return b"".join(keys)


class Chain:
    """The growing chain of one request. `keys[i]` is the key at token position `(i + 1) * MATCH_UNIT`."""

    def __init__(
        self, root: bytes, token_ids: Sequence[int] = (), extra: bytes = b"", *, chunk_tokens: int
    ) -> None:
        assert chunk_tokens > 0 and chunk_tokens % MATCH_UNIT == 0, chunk_tokens
        self.root = root
        self.extra = extra
        self.keys: list[bytes] = []
        self._units_a_chunk = chunk_tokens // MATCH_UNIT
        self._state = hashlib.sha256()
        self._rest = b""
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; new whole units get their keys."""
        tokens, step, keys = self._rest + pack_tokens(token_ids), 4 * MATCH_UNIT, self.keys
        for at in range(0, len(tokens) - step + 1, step):
            if len(keys) % self._units_a_chunk == 0:
                self._state = hashlib.sha256(_opening(keys[-1] if keys else self.root, self.extra))
            self._state.update(tokens[at : at + step])
            keys.append(self._state.copy().digest())
        self._rest = tokens[len(tokens) - len(tokens) % step :]

    def key_at(self, position: int) -> bytes:
        """The key at token `position`, a multiple of the unit (0 is the root)."""
        assert position % MATCH_UNIT == 0 and position >= 0, position
        return self.keys[position // MATCH_UNIT - 1] if position else self.root

    def chunk_keys(self, units: int) -> bytes:
        """`chunk_keys` of the first so many units: joined keys at the ends of their chunks."""
        step = self._units_a_chunk
        ends = [*range(step, units, step), units] if units else []
        return b"".join(self.keys[end - 1] for end in ends)
