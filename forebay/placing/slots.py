"""Which node serves under which name. A slot keeps its name while nodes come and go, since a router knows it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Change:
    """What is to be done now: nodes of `left` slots are gone, `came` slots are to be started on theirs."""

    left: tuple[int, ...]
    came: dict[int, str]


@dataclass
class Slots:
    """So many slots, each with its node, or vacant."""

    count: int
    nodes: dict[int, str] = field(default_factory=dict)

    def update(self, alive: Collection[str]) -> Change:
        """These nodes are there. Each serves in one slot at most; who serves goes on where it is; vacant slots are
        filled in order, nodes taken in the order given."""
        left = tuple(slot for slot, node in sorted(self.nodes.items()) if node not in alive)
        for slot in left:
            del self.nodes[slot]
        free = [node for node in alive if node not in self.nodes.values()]
        vacant = [slot for slot in range(self.count) if slot not in self.nodes]
        came = dict(zip(vacant, free, strict=False))
        self.nodes.update(came)
        return Change(left, came)

    def vacate(self, slot: int) -> None:
        """Its node can't serve."""
        self.nodes.pop(slot, None)
