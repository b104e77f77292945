"""The prefix index as a dictionary of sets: what `PrefixIndex` means, in twenty lines. The tests' oracle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence


class NaiveIndex:
    """Keys are integers. See `PrefixIndex` for what each method does."""

    def __init__(self) -> None:
        self.blocks: defaultdict[int, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self.blocks)

    def stored(self, holder: int, keys: Iterable[int]) -> None:
        """`holder` has these blocks now."""
        for key in keys:
            self.blocks[key].add(holder)

    def removed(self, holder: int, keys: Iterable[int]) -> None:
        """`holder` doesn't have these blocks any more."""
        for key in keys:
            if key in self.blocks:
                self.blocks[key].discard(holder)
                if not self.blocks[key]:
                    del self.blocks[key]

    def drop(self, holder: int) -> None:
        """`holder` has nothing any more."""
        self.removed(holder, list(self.blocks))

    def lengths(self, keys: Sequence[int]) -> dict[int, int]:
        """For each holder of the first block: how many of the prompt's first blocks it holds."""
        found: dict[int, int] = {}
        alive: set[int] | None = None
        for position, key in enumerate(keys):
            here = self.blocks.get(key, set())
            alive = set(here) if alive is None else alive & here
            if not alive:
                break
            found |= dict.fromkeys(alive, position + 1)
        return found
