"""A shape or geometry that can't be served is refused before any byte moves, by a message that names the number."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kvstore.geometry import ConvPart, RowField, check_group
from forebay.kvstore.identity import GroupGeometry, Namespace, check_namespace, decode_namespace, encode_namespace
from forebay.kvstore.layout import STATE_ORDER, TOKEN_ORDER, Shard, View, check_shard, even_stages

FULL = GroupGeometry("full", "full", (0, 2, 4), 6, 8, "bfloat16")
WINDOW = GroupGeometry("window", "window", (1, 3), 2, 8, "bfloat16", 64)
LATENT = GroupGeometry("mla", "latent", (0, 1), 1, 512, "float8_e4m3fn", beside=(RowField("rope", 64, "bfloat16"),))
INDEXER = GroupGeometry("index", "indexer", (0, 1), 1, 128, "float8_e4m3fn", beside=(RowField("scale", 1, "float32"),))
CONV = (ConvPart("q", 2, 4, 3, "bfloat16"), ConvPart("v", 6, 4, 3, "bfloat16"))
STATE = GroupGeometry("state", "recurrent", (5, 6), 6, 4, "float32", value_dim=8, conv=CONV)


def spaces(*groups: GroupGeometry) -> Namespace:
    found = Namespace(b"w", groups, chunk_tokens=64)
    assert check_namespace(found) is None
    return found


REFUSED = [
    (Shard(tp_size=4), "group 'full': tp_size 4 must divide its 6 kv_heads or be a multiple of them"),
    (Shard(tp_size=5), "group 'full': tp_size 5 must divide its 6 kv_heads or be a multiple of them"),
    (Shard(tp_rank=3, tp_size=3), "tp_rank 3 must be 0 to 2, tp_size is 3"),
    (Shard(tp_rank=-1), "tp_rank -1 must be 0 to 0"),
    (Shard(tp_size=0), "tp_size 0 must be 1 to"),
    (Shard(pcp_rank=2, pcp_size=2), "pcp_rank 2 must be 0 to 1"),
    (Shard(pp_size=2), "stages has 0 entries, pp_size is 2"),
    (Shard(pp_size=2, stages=(3, 2, 2)), "stages has 3 entries, pp_size is 2"),
    (Shard(pp_size=3, stages=(4, 0, 3)), "lower pp_size 3"),
    (Shard(pp_size=2, stages=(3, 3)), "are 6 layers in all, but a cache group has layer 6"),
    (Shard(stages=(3,)), "are 3 layers in all, but a cache group has layer 6"),
    (Shard(dcp_size=2, undivided=("stat",)), "undivided names 'stat', the namespace's groups are full, window, state"),
    (
        Shard(dcp_size=2),
        "group 'state': a state has no tokens to deal out over dcp_size 2: name the group",
    ),
    (Shard(dcp_size=2, interleave=3, undivided=("state",)), "interleave 3 neither divides the match unit of 16"),
    (Shard(dcp_size=2, interleave=24, undivided=("state",)), "interleave 24 neither divides the match unit of 16"),
    (Shard(interleave=0), "interleave 0 must be positive"),
    (Shard(dcp_size=2, interleave=8, block_tokens=12), "block_tokens 12 must be a multiple of interleave 8"),
    (Shard(dcp_size=2, interleave=32, block_tokens=16), "block_tokens 16 must be a multiple of interleave 32"),
    (Shard(tp_size=3, dcp_size=2, dcp_ranks="tp"), "dcp_size 2 doesn't divide tp_size 3"),
    (Shard(tp_size=2, tp_rank=1, dcp_size=2, dcp_ranks="tp"), "dcp_rank 0 of tp_rank 1 must be 1"),
    (
        Shard(tp_size=6, dcp_size=3, dcp_ranks="tp", undivided=("state",)),
        "group 'full': dcp_size 3 must divide the 1 ranks that share a head (tp_size 6 over 6 kv_heads)",
    ),
    (Shard(block_tokens=0), "block_tokens 0 must be 1 to"),
    (Shard(block_tokens=-16), "block_tokens -16 must be 1 to"),
    (Shard(blocks=-1), "blocks -1 must be 0 to"),
    (Shard(order=TOKEN_ORDER[:-1]), "must have each of block, layer, tensor, head, token, field once"),
    (Shard(order=(*TOKEN_ORDER[:-1], "head")), "must have each of block, layer, tensor, head, token, field once"),
    (Shard(order=("layer", "block", *TOKEN_ORDER[2:])), "blocks must be given where order doesn't begin with it"),
    (Shard(state_order=("layer", "block", *STATE_ORDER[2:])), "blocks must be given where state_order"),
    (
        Shard(state_order=("block", "layer", "tensor", "head", "field", "tap", "channel")),
        "field must come before head",
    ),
]


@pytest.mark.parametrize(("shard", "why"), REFUSED)
def test_a_shape_that_can_t_be_served_is_told_which_number_to_change(shard: Shard, why: str) -> None:
    spec = spaces(FULL, WINDOW, STATE)
    refusal = check_shard(spec, shard)
    assert refusal is not None and why in refusal, refusal
    with pytest.raises(ValueError, match=r"."):
        View(spec, 0, shard)


def test_heads_of_every_part_of_a_state_count() -> None:
    state = msgspec.structs.replace(STATE, kv_heads=4, conv=(CONV[0], ConvPart("k", 3, 4, 3, "bfloat16")))
    assert check_shard(spaces(state), Shard(tp_size=4)) == (
        "group 'state': tp_size 4 must divide its 3 heads of 'k' or be a multiple of them"
    )


def test_what_can_be_served_is() -> None:
    spec = spaces(FULL, WINDOW, STATE, LATENT, INDEXER)
    shapes = [
        Shard(),
        Shard(tp_size=6, tp_rank=5),
        Shard(tp_size=12, tp_rank=11, dcp_size=2, dcp_rank=1, dcp_ranks="tp", undivided=("state",), interleave=16),
        Shard(pp_size=3, pp_rank=1, stages=(1, 5, 1)),
        Shard(dcp_size=3, dcp_rank=2, undivided=("state", "window"), interleave=8, block_tokens=24),
        Shard(blocks=7, order=("tensor", "layer", "block", "token", "head", "field"), block_tokens=1),
    ]
    assert [check_shard(spec, shape) for shape in shapes] == [None] * len(shapes)


def test_stages_as_even_as_they_go() -> None:
    assert [even_stages(7, n) for n in (1, 2, 3, 7)] == [(7,), (4, 3), (3, 2, 2), (1,) * 7]


numbers = st.integers(-1, 9)


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_every_shape_is_either_refused_or_served(data: st.DataObject) -> None:
    """No combination of numbers gets through the check and fails behind it."""
    spec = spaces(FULL, WINDOW, STATE, LATENT)
    draw = data.draw
    shard = Shard(
        tp_rank=draw(numbers), tp_size=draw(numbers), pp_rank=draw(numbers), pp_size=draw(numbers),
        stages=tuple(draw(st.lists(numbers, max_size=3))), dcp_rank=draw(numbers), dcp_size=draw(numbers),
        interleave=draw(st.integers(-1, 33)), dcp_ranks=draw(st.sampled_from(["own", "tp"])),
        undivided=tuple(draw(st.lists(st.sampled_from(["full", "state", "no"]), max_size=2))),
        block_tokens=draw(st.integers(-1, 70)), blocks=draw(numbers),
    )  # fmt: skip
    refusal = check_shard(spec, shard)
    for group in range(len(spec.groups)):
        if refusal is None:
            View(spec, group, shard).runs(64, range(64, 128))
        else:
            assert any(character.isdigit() for character in refusal) or "undivided" in refusal
            with pytest.raises(ValueError, match=r"."):
                View(spec, group, shard)


# --- geometries ----------------------------------------------------------------------------------------


def changed(group: GroupGeometry, **fields: object) -> GroupGeometry:
    return msgspec.structs.replace(group, **fields)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (changed(FULL, dtype="float12"), "dtype 'float12' is none of float64, float32"),
        (changed(LATENT, beside=(RowField("rope", 64, "half"),)), "dtype 'half' is none of"),
        (changed(STATE, conv=(ConvPart("q", 2, 4, 3, ""),)), "dtype '' is none of"),
        (changed(FULL, kv_heads=0), "layers, kv_heads and head_dim must all be positive"),
        (changed(FULL, layers=()), "layers, kv_heads and head_dim must all be positive"),
        (changed(FULL, layers=(2, 1)), "layers (2, 1) must ascend"),
        (changed(FULL, layers=(1, 1)), "layers (1, 1) must ascend"),
        (changed(FULL, layers=(-1, 1)), "layers (-1, 1) must ascend"),
        (changed(FULL, window=5), "kind 'full' has no window"),
        (changed(INDEXER, window=5), "kind 'indexer' has no window"),
        (changed(WINDOW, window=None), "kind 'window' needs its window"),
        (changed(WINDOW, window=0), "window 0 must be positive"),
        (changed(FULL, value_dim=0), "value_dim 0 must be positive"),
        (changed(FULL, value_dim=8), "value_dim 8 equals head_dim: leave it away"),
        (changed(LATENT, value_dim=9), "leave value_dim away"),
        (changed(LATENT, kv_heads=2), "kv_heads 2 must be 1"),
        (changed(FULL, beside=(RowField("s", 0, "float32"),)), "sizes of the parts of beside must all be positive"),
        (changed(FULL, beside=(RowField("s", 1, "int8"),) * 2), "each with a name of its own"),
        (changed(FULL, beside=(RowField("", 1, "int8"),)), "a part of beside must have a name"),
        (changed(FULL, conv=CONV), "kind 'full' has no conv window"),
        (changed(STATE, beside=(RowField("s", 1, "int8"),)), "kind 'recurrent' has no rows"),
        (changed(STATE, conv=(ConvPart("q", 2, 4, 0, "int8"),)), "sizes of the parts of conv must all be positive"),
        (
            changed(STATE, conv=(CONV[0], ConvPart("v", 6, 4, 2, "int8"))),
            "all parts of one conv window have the same taps",
        ),
        (changed(FULL, head_dim=2**24), "a granule of 19327352832 bytes is over 1 GiB: split its layers"),
        (changed(STATE, head_dim=2**24), "a state of 6442451328 bytes is over 1 GiB: split its layers"),
        (changed(FULL, name=""), "its name must have 1 to 64 bytes"),
    ],
)
def test_a_geometry_that_can_t_be_served_is_told_why(group: GroupGeometry, why: str) -> None:
    refusal = check_group(group)
    assert refusal is not None and refusal.startswith(f"group {group.name!r}: ") and why in refusal, refusal
    with pytest.raises(ValueError, match=r"."):
        decode_namespace(encode_namespace(Namespace(b"w", (group,))))


def test_every_number_of_a_geometry_makes_another_namespace() -> None:
    part, field = CONV[0], LATENT.beside[0]
    groups = [
        FULL, WINDOW, LATENT, INDEXER, STATE,
        changed(FULL, value_dim=9), changed(FULL, head_dim=9), changed(FULL, kv_heads=3), changed(FULL, layers=(0, 2)),
        changed(FULL, dtype="float16"), changed(FULL, kind="window", window=64), changed(WINDOW, window=63),
        changed(LATENT, window=64), changed(LATENT, kind="indexer"), changed(LATENT, beside=()),
        *(changed(LATENT, beside=(msgspec.structs.replace(field, **c),))
          for c in (dict(name="x"), dict(count=65), dict(dtype="float16"))),
        changed(STATE, value_dim=9), changed(STATE, conv=CONV[:1]), changed(STATE, conv=CONV[::-1]),
        *(changed(STATE, conv=(msgspec.structs.replace(part, **c), CONV[1]))
          for c in (dict(name="x"), dict(heads=1), dict(channels=5), dict(dtype="float16"))),
    ]  # fmt: skip
    assert [check_group(group) for group in groups] == [None] * len(groups)
    spaces_of = [Namespace(b"w", (group,)) for group in groups]
    assert len({space.id for space in spaces_of}) == len(groups)
    assert [decode_namespace(encode_namespace(space)) for space in spaces_of] == spaces_of


def test_sizes_are_those_of_known_models() -> None:
    """Bytes a token, or of a state, from the published shapes."""
    llama = GroupGeometry("full", "full", tuple(range(32)), 8, 128, "bfloat16")
    deepseek = GroupGeometry("mla", "latent", tuple(range(61)), 1, 576, "bfloat16")
    scales = (RowField("scale", 4, "float32"), RowField("rope", 64, "bfloat16"))
    quantised = GroupGeometry("mla", "latent", tuple(range(61)), 1, 512, "float8_e4m3fn", beside=scales)
    index = GroupGeometry("index", "indexer", tuple(range(61)), 1, 128, "float8_e4m3fn", beside=INDEXER.beside)
    assert [g.granule_bytes // 16 for g in (llama, deepseek, quantised, index)] == [131072, 70272, 40016, 8052]
    conv = tuple(ConvPart(n, h, 128, 3, "bfloat16") for n, h in (("q", 16), ("k", 16), ("v", 32)))
    next_80b = GroupGeometry("state", "recurrent", tuple(range(36)), 32, 128, "float32", conv=conv)
    assert next_80b.granule_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
