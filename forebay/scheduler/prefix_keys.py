"""Keys of prefixes: one 64-bit number a block that stands for it and all before it, computed from tokens alone.

Engines name blocks by hashes of their own, which differ from one to the next; a router that hashes the tokens in
their events itself can compare all of them, and with prompts.

    h[j] = mix(sum of tokens[j][k] * weight[k] + j * step + extra[j])        a block by itself, at its place
    key[j] = key[j - 1] * base + h[j]                                        and all before it; key[-1] is the root

all modulo 2**64. The recurrence is solved with powers of `base` and of its inverse, so that numpy does a prompt of
100,000 tokens in a millisecond. These are no cryptographic hashes: who wants to can make two prompts collide,
and then one of them goes to a worker that has less of it than was thought. What is served is found by other keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from forebay.scheduler.key_table import Keys
from forebay.scheduler.loops import compiled_loops

BLOCK_TOKENS_MAX = 1 << 12
_PIECE = 1 << 13
"""Blocks that are done at once: powers are kept for so many."""
_BASE = 0xB5297A4D3F84D5B5
_STEP = np.uint64(0xA0761D6478BD642F)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)
_NO_EXTRAS: Keys = np.empty(0, np.uint64)

Tokens = npt.NDArray[np.uint32]


def root_of(model: str, block_tokens: int, lora: str | int | None = None) -> int:
    """Where chains of a model (and adapter) begin, in blocks of so many tokens. Different ones share nothing."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(["forebay prefix", model, block_tokens, lora]))


def extra_of(entry: Sequence[Any] | None) -> int:
    """A number for what beside tokens makes a block: an entry of `extra_keys`, or a request's salt as [salt]."""
    return 0 if not entry else xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(list(entry)))


def as_tokens(tokens: bytes | Sequence[int]) -> Tokens:
    """Token ids, or their u32 LE form, as an array. Ids over 32 bits, and negative ones, are cut to them."""
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        return np.frombuffer(tokens, "<u4")
    try:
        return np.array(tokens, np.uint64).astype(np.uint32)
    except OverflowError:  # no tokeniser has negative ones, but an event may say anything
        return np.array([token & 0xFFFFFFFF for token in tokens], np.uint32)


def prefix_keys(
    parent: int, tokens: Tokens, block_tokens: int, *, depth: int = 0, extras: Sequence[int] | None = None
) -> Keys:
    """The keys of the whole blocks in `tokens`, which follow the block with key `parent`: the `depth`-th of its chain.

    `extras` has one number a block (see `extra_of`), or is shorter: the others have none.
    """
    blocks = tokens.size // block_tokens
    if not blocks:
        return np.empty(0, np.uint64)
    loops = compiled_loops()
    if loops is not None:
        more = _NO_EXTRAS if extras is None else np.array(extras, np.uint64)
        keys: Keys = loops.prefix_keys(parent, tokens, _weights(block_tokens), depth, more)
        return keys
    pieces = []
    for at in range(0, blocks, _PIECE):
        count = min(_PIECE, blocks - at)
        here = tokens[at * block_tokens : (at + count) * block_tokens].reshape(count, block_tokens)
        own = _blocks(here, block_tokens, depth + at, None if extras is None else extras[at : at + count])
        piece = _chained(parent, own)
        parent = int(piece[-1])
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _blocks(tokens: Tokens, block_tokens: int, depth: int, extras: Sequence[int] | None) -> Keys:
    """Each block by itself, at its place in the chain."""
    count = len(tokens)
    own = tokens.astype(np.uint64) @ _weights(block_tokens)
    own += np.arange(depth, depth + count, dtype=np.uint64) * _STEP
    if extras is not None and any(extras):
        own[: len(extras)] += np.array(extras, np.uint64)
    own ^= own >> _S1
    own *= _M1
    own ^= own >> _S2
    own *= _M2
    own ^= own >> _S3
    return own


def _chained(parent: int, own: Keys) -> Keys:
    powers, inverses = _powers()
    sums = np.cumsum(own * inverses[: own.size])
    sums += np.uint64(parent)
    sums *= powers[: own.size]
    return sums


@lru_cache(maxsize=16)
def _weights(block_tokens: int) -> Keys:
    """Odd numbers, one for each place in a block; the same in every process."""
    assert 0 < block_tokens <= BLOCK_TOKENS_MAX, block_tokens
    drawn = [xxhash.xxh3_64_intdigest(place.to_bytes(8, "little"), seed=_BASE) | 1 for place in range(block_tokens)]
    return np.array(drawn, np.uint64)


@lru_cache(maxsize=1)
def _powers() -> tuple[Keys, Keys]:
    """base ** (i + 1) and its inverse, modulo 2**64."""
    inverse = pow(_BASE, -1, 1 << 64)
    powers, inverses, up, down = [], [], 1, 1
    for _ in range(_PIECE):
        up, down = up * _BASE % (1 << 64), down * inverse % (1 << 64)
        powers.append(up)
        inverses.append(down)
    return np.array(powers, np.uint64), np.array(inverses, np.uint64)
