"""From an engine's layers to our cache groups, and back: which of its groups holds which of our layers.

An engine may divide layers of one kind over several of its groups, to make them equally large; ours hold all layers
of one geometry. Groups have the names and the order that our own worker gives them, so that chunks are shared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.connectors.tracking import EngineGroup
from forebay.errors import ConfigError
from forebay.kvstore.geometry import GroupGeometry, GroupKind

KINDS: tuple[GroupKind, ...] = ("full", "window", "latent")


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """One layer of the engine: its cache's `name`, its number in the model, and what a token of it consists of.

    `kv_heads` counts those of all ranks. `engine_group` is the place of its group, whose blocks hold `block_tokens`.
    """

    name: str
    layer: int
    kind: GroupKind
    kv_heads: int
    head_dim: int
    value_dim: int | None
    dtype: str
    window: int | None
    engine_group: int
    block_tokens: int

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for layers of one cache group of ours."""
        return (KINDS.index(self.kind), self.kv_heads, self.head_dim, self.value_dim, self.dtype, self.window)


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of our group `group` that one of the engine's groups holds: their caches' names, by `places` in ours."""

    group: int
    engine_group: int
    block_tokens: int
    names: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Our groups, the engine's, and how they hang together."""

    geometries: tuple[GroupGeometry, ...]
    engine: tuple[EngineGroup, ...]
    parts: tuple[Part, ...]


def group_layers(layers: Sequence[EngineLayer]) -> Grouping:
    """Raises ConfigError for what can't be grouped."""
    if not layers:
        raise ConfigError("the engine has no attention layer whose cache could be stored")
    kinds = sorted({layer.alike for layer in layers}, key=repr)
    kinds.sort(key=lambda alike: int(str(alike[0])))
    geometries: list[GroupGeometry] = []
    parts: list[Part] = []
    for group, alike in enumerate(kinds):
        members = sorted((layer for layer in layers if layer.alike == alike), key=lambda layer: layer.layer)
        if len({layer.layer for layer in members}) != len(members):
            raise ConfigError("two caches of one layer are of the same kind: a draft model can't be stored")
        geometries.append(_geometry(members, [geometry.kind for geometry in geometries]))
        parts += _parts(group, members)
    return Grouping(tuple(geometries), _engine_groups(layers, parts), tuple(parts))


def _geometry(members: Sequence[EngineLayer], before: Sequence[GroupKind]) -> GroupGeometry:
    first = members[0]
    same = before.count(first.kind)
    return GroupGeometry(
        name=first.kind if not same else f"{first.kind}{same + 1}",
        kind=first.kind,
        layers=tuple(layer.layer for layer in members),
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        dtype=first.dtype,
        window=first.window,
        value_dim=first.value_dim if first.value_dim != first.head_dim else None,
    )


def _parts(group: int, members: Sequence[EngineLayer]) -> list[Part]:
    parts = []
    for engine_group in sorted({layer.engine_group for layer in members}):
        mine = [(place, layer) for place, layer in enumerate(members) if layer.engine_group == engine_group]
        names, places = tuple(layer.name for _, layer in mine), tuple(place for place, _ in mine)
        parts.append(Part(group, engine_group, mine[0][1].block_tokens, names, places))
    return parts


def _engine_groups(layers: Sequence[EngineLayer], parts: Sequence[Part]) -> tuple[EngineGroup, ...]:
    blocks = {layer.engine_group: layer.block_tokens for layer in layers}
    if sorted(blocks) != list(range(len(blocks))):
        raise ConfigError(f"the engine has cache groups beside {sorted(blocks)} that can't be stored")
    return tuple(
        EngineGroup(blocks[place], tuple(sorted({part.group for part in parts if part.engine_group == place})))
        for place in range(len(blocks))
    )
