"""From an engine's layers to our groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.connectors.grouping import EngineLayer, group_layers
from forebay.errors import ConfigError

FULL = EngineLayer("l0", 0, "full", 2, 32, 32, "float32", None, 0, 16)


def layer(number: int, group: int, window: int | None = None) -> EngineLayer:
    kind = "full" if window is None else "window"
    return replace(FULL, name=f"l{number}", layer=number, kind=kind, window=window, engine_group=group)


def test_layers_of_one_kind_are_one_group_however_the_engine_divides_them() -> None:
    windows = [layer(0, 1, 64), layer(3, 1, 64), layer(1, 2, 64), layer(4, 2, 64)]
    grouping = group_layers([*windows, layer(2, 0), layer(5, 0)])
    assert [(g.name, g.kind, g.layers, g.window) for g in grouping.geometries] == [
        ("full", "full", (2, 5), None), ("window", "window", (0, 1, 3, 4), 64),
    ]  # fmt: skip
    assert [(p.group, p.engine_group, p.names, p.places) for p in grouping.parts] == [
        (0, 0, ("l2", "l5"), (0, 1)), (1, 1, ("l0", "l3"), (0, 2)), (1, 2, ("l1", "l4"), (1, 3)),
    ]  # fmt: skip
    assert [group.serves for group in grouping.engine] == [(0,), (1,), (1,)]


def test_different_geometries_are_different_groups_with_names_of_their_own() -> None:
    wide = replace(layer(2, 1), head_dim=64, value_dim=64)
    latent = replace(layer(3, 2), kind="latent", kv_heads=1, head_dim=80, value_dim=None)
    grouping = group_layers([latent, wide, layer(0, 0), layer(1, 0)])
    assert [(g.name, g.head_dim) for g in grouping.geometries] == [("full", 32), ("full2", 64), ("latent", 80)]


def test_one_group_of_the_engine_may_serve_several_of_ours() -> None:
    wide = replace(layer(1, 0), value_dim=64)
    grouping = group_layers([layer(0, 0), wide])
    assert grouping.engine[0].serves == (0, 1)
    assert [g.value_dim for g in grouping.geometries] == [None, 64]


def test_a_second_cache_of_the_same_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft model"):
        group_layers([layer(0, 0), replace(layer(0, 0), name="draft")])
    with pytest.raises(ConfigError, match="no attention layer"):
        group_layers([])
    with pytest.raises(ConfigError, match="can't be stored"):
        group_layers([layer(0, 1)])
