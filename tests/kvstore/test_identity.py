"""Any difference misses; the same is always the same, whoever computes it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.identity import (
    NAMESPACE_BYTES_MAX,
    Chain,
    GroupGeometry,
    Namespace,
    chain,
    chunk_key,
    chunk_keys,
    decode_namespace,
    encode_namespace,
    pack_tokens,
    root_key,
    tenant_salt,
    unpack_tokens,
)
from tests.kvstore.support import namespace

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


GOLDEN = ["708e24994b4d923d", "386465d05f5208c1", "260e96eda121d2ad", "9b6fdaf4ce0bbe4f"]


def test_the_chain_is_what_the_documents_say() -> None:
    """Golden values: they may never change, or every stored chunk of every user is lost."""
    spec = Namespace(weights=b"w" * 32, groups=(GroupGeometry("full", "full", (0, 1), 2, 64, "bfloat16"),))
    root = root_key(spec.id)
    keys = chain(root, pack_tokens(list(range(32))))
    assert [spec.id.hex()[:16], root.hex()[:16], keys[0].hex()[:16], keys[1].hex()[:16]] == GOLDEN


@given(tokens, st.integers(0, 100))
def test_a_chain_is_the_same_however_it_was_fed(ids: list[int], cut: int) -> None:
    root = root_key(b"n" * 32)
    whole = Chain(root, ids, b"lora", chunk_tokens=32)
    parts = Chain(root, extra=b"lora", chunk_tokens=32)
    parts.extend(ids[:cut])
    for one in ids[cut:]:
        parts.extend([one])
    assert whole.keys == parts.keys
    assert len(whole.keys) == len(ids) // 16


@given(tokens, st.sampled_from([16, 32, 48, 256]), st.sampled_from([b"", b"lora"]))
def test_keys_at_chunk_ends_are_the_chain_s_and_each_chunk_s_own(ids: list[int], size: int, extra: bytes) -> None:
    root, packed = root_key(b"n" * 32), pack_tokens(ids)
    keys = chunk_keys(root, packed, size, extra)
    whole = Chain(root, ids, extra, chunk_tokens=size)
    assert keys == whole.chunk_keys(len(whole.keys))
    parent, end = root, len(ids) // 16 * 16
    for index, start in enumerate(range(0, end, size)):
        chunk = packed[4 * start : 4 * min(start + size, end)]
        key = keys[32 * index : 32 * index + 32]
        assert key == chunk_key(parent, chunk, extra) == chain(parent, chunk, extra)[-1]
        assert chain(parent, chunk, extra) == whole.keys[start // 16 : start // 16 + len(chunk) // 64]
        parent = key
    assert len(keys) == 32 * -(-end // size)


@given(st.lists(st.integers(0, 1000), min_size=32, max_size=64), st.integers(0, 31))
def test_one_other_token_changes_its_unit_and_all_that_follow(ids: list[int], at: int) -> None:
    other = list(ids)
    other[at] += 1
    left, right = chain(b"r" * 32, pack_tokens(ids)), chain(b"r" * 32, pack_tokens(other))
    assert left[: at // 16] == right[: at // 16]
    assert all(a != b for a, b in zip(left[at // 16 :], right[at // 16 :], strict=True))


def test_salt_extra_and_parent_each_change_every_key() -> None:
    data = pack_tokens(range(16))
    keys = {
        chain(root_key(b"n" * 32), data)[0],
        chain(root_key(b"n" * 32, b"salt"), data)[0],
        chain(root_key(b"m" * 32), data)[0],
        chain(root_key(b"n" * 32), data, b"lora")[0],
        chain(root_key(b"n" * 32), data, b"lorb")[0],
    }
    assert len(keys) == 5


def test_every_field_of_a_namespace_matters() -> None:
    base = namespace()
    group = base.groups[0]
    variants = [
        msgspec.structs.replace(base, weights=b"x" * 32),
        msgspec.structs.replace(base, epoch=1),
        msgspec.structs.replace(base, compute="float32"),
        msgspec.structs.replace(base, quantisation="fp8"),
        msgspec.structs.replace(base, positions=(("rope_theta", "10000.0"),)),
        msgspec.structs.replace(base, chunk_tokens=64),
        msgspec.structs.replace(base, groups=base.groups[:1]),
        *(
            msgspec.structs.replace(base, groups=(changed, base.groups[1]))
            for changed in (
                msgspec.structs.replace(group, kv_heads=2),
                msgspec.structs.replace(group, head_dim=16),
                msgspec.structs.replace(group, layers=(3,)),
                msgspec.structs.replace(group, dtype="bfloat16"),
            )
        ),
    ]
    assert len({base.id, *(v.id for v in variants)}) == len(variants) + 1


def test_a_tenants_salt_needs_its_secret() -> None:
    assert tenant_salt(b"a", "s") != tenant_salt(b"b", "s")
    assert tenant_salt(b"a", "s") != tenant_salt(b"a", "t")
    assert tenant_salt(b"a", "s") == tenant_salt(b"a", "s")


@given(tokens)
def test_tokens_round_trip(ids: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(ids))) == ids


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_out_of_range_is_an_error(bad: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([bad])


@pytest.mark.parametrize(
    "change",
    [
        dict(version=1),
        dict(chunk_tokens=40),
        dict(groups=()),
        dict(hash="md5"),
        dict(weights=b""),
        dict(groups=(GroupGeometry("a", "full", (0,), 1, 8, "float12"),)),
        dict(groups=(GroupGeometry("a", "full", (0,), 1, 8, "float32", 5),)),
        dict(groups=(GroupGeometry("a", "window", (0,), 1, 8, "float32"),)),
        dict(groups=(GroupGeometry("a", "full", (), 1, 8, "float32"),)),
        dict(groups=(GroupGeometry("a", "window", (0,), 1, 8, "float32", 0),)),
    ],
)
def test_a_namespace_that_cannot_be_served_says_why(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_namespace(encode_namespace(msgspec.structs.replace(namespace(), **change)))
    assert decode_namespace(encode_namespace(namespace())) == namespace()


def test_a_namespace_that_is_longer_than_any_model_needs_is_refused() -> None:
    long = namespace(compute="c" * NAMESPACE_BYTES_MAX)
    with pytest.raises(ValueError, match="is over"):
        decode_namespace(encode_namespace(long))
