"""The device block pool of one cache group: a hot buffer over the store.

A block is one unit of tokens, one granule of bytes. Full blocks are known by their unit key and stay
findable after their last user has gone, until somebody needs the room; the least recently used goes first.

A block has two kinds of users. *Requests* share it by reference; *pins* belong to copies under way. One
without requests but with pins is *draining*: it can be found and shared, and can't be taken.

Promises are kept by counting. `reserve` sets blocks aside without choosing them; `take` then chooses. In a
window group requests drop blocks all the time and count on getting them back, which a block that somebody
else shares would not give; so there every sharer pays for a shared block (`shadow`), and a drop always
returns one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

NO_BLOCK = -1


class GroupPool:
    """Block numbers only; the bytes are elsewhere. Owned by the engine's thread."""

    def __init__(self, blocks: int, *, sharers_pay: bool, on_evicted: Callable[[bytes], None]) -> None:
        assert blocks > 0, blocks
        self.blocks = blocks
        self.evictions = 0
        self._sharers_pay = sharers_pay
        self._on_evicted = on_evicted
        self._refs = [0] * blocks
        self._pins = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0
        self._shadow = 0
        self._draining = 0

    # --- gauges ----------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that could be reserved now. Below zero while promised ones are still draining."""
        return len(self._free) + len(self._idle) - self._reserved - self._shadow

    @property
    def takeable(self) -> int:
        """Blocks that nobody uses in any way."""
        return len(self._free) + len(self._idle)

    @property
    def draining(self) -> int:
        """Blocks that only copies under way still use."""
        return self._draining

    @property
    def cached(self) -> int:
        """Blocks that can be found by key."""
        return len(self._by_key)

    # --- promises and blocks ---------------------------------------------------------------------------

    def reserve(self, count: int) -> bool:
        """Set `count` blocks aside, all or none."""
        assert count >= 0, count
        if count > self.available:
            return False
        self._reserved += count
        return True

    def keep_promise(self) -> None:
        """Reserve the block that its holder has just dropped; it may still be draining."""
        assert self.available + self._draining > 0
        self._reserved += 1

    def unreserve(self, count: int) -> None:
        """Give back what was reserved and not taken."""
        assert 0 <= count <= self._reserved, (count, self._reserved)
        self._reserved -= count

    def take(self) -> int:
        """Turn one reservation into a block with one reference, evicting a cached one if need be."""
        assert self._reserved > 0 and self.takeable > 0, (self._reserved, self.takeable)
        self._reserved -= 1
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        assert self._refs[block] == self._pins[block] == 0 and self._keys[block] is None, block
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more request uses `block`. The caller has checked `price` against `available`."""
        if self._refs[block] == 0:
            self._wake(block)
        elif self._sharers_pay:
            self._shadow += 1
        self._refs[block] += 1

    def price(self, block: int) -> int:
        """How much less will be available once `block` is shared: 0 or 1."""
        return int(self._sharers_pay or (self._refs[block] == 0 and self._pins[block] == 0))

    def drop(self, block: int) -> None:
        """One request less. The last one's blocks stay findable, as the most recently used."""
        assert self._refs[block] > 0, block
        self._refs[block] -= 1
        if self._refs[block] > 0:
            self._shadow -= int(self._sharers_pay)
        elif self._pins[block] > 0:
            self._draining += 1
        else:
            self._settle(block)

    def pin(self, block: int) -> None:
        """A copy from `block` begins; its bytes stay until `unpin`."""
        if self._refs[block] == 0 and self._pins[block] == 0:
            del self._idle[block]
            self._draining += 1
        self._pins[block] += 1

    def idle(self, block: int) -> bool:
        """Whether nobody uses `block`, so that pinning it makes one less available."""
        return self._refs[block] == 0 and self._pins[block] == 0

    def sole(self, block: int) -> bool:
        """Whether its one user's drop would give `block` back at once."""
        return self._refs[block] == 1 and self._pins[block] == 0

    def unpin(self, block: int) -> None:
        """That copy has ended."""
        assert self._pins[block] > 0, block
        self._pins[block] -= 1
        if self._pins[block] == 0 and self._refs[block] == 0:
            self._draining -= 1
            self._settle(block)

    # --- the cache -------------------------------------------------------------------------------------

    def seal(self, block: int, key: bytes) -> bool:
        """`block` is full and holds the unit `key`. False if another block is known by that key already;
        this one then stays private."""
        assert self._refs[block] > 0 and self._keys[block] is None, block
        if key in self._by_key:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        return True

    def find(self, key: bytes) -> int | None:
        """The block that holds unit `key`. Valid until the next `take`, unless shared or pinned."""
        return self._by_key.get(key)

    def sealed(self, block: int) -> bool:
        """Whether `block` is known by a key, so that nobody may write into it."""
        return self._keys[block] is not None

    def _wake(self, block: int) -> None:
        if self._pins[block] > 0:
            self._draining -= 1
        else:
            del self._idle[block]

    def _settle(self, block: int) -> None:
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, block
        self._keys[block] = None
        del self._by_key[key]
        self._on_evicted(key)

    def check(self) -> None:
        """Assert that the books balance. For tests; walks all blocks."""
        used = [b for b in range(self.blocks) if self._refs[b] or self._pins[b]]
        unused = [*self._free, *self._idle]
        assert sorted(used + unused) == list(range(self.blocks)), "a block is lost or listed twice"
        assert self._draining == sum(not self._refs[b] for b in used)
        extra = sum(self._refs[b] - 1 for b in used if self._refs[b])
        assert self._shadow == (extra if self._sharers_pay else 0)
        assert all(self._keys[b] is None for b in self._free)
        assert all(self._keys[b] is not None for b in self._idle)
        assert {key: b for b, key in enumerate(self._keys) if key is not None} == self._by_key
        assert 0 <= self._reserved <= self.takeable + self._draining - self._shadow
