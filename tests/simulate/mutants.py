"""The mistakes that docs/mutants.md lists, as patches of the real classes.

python -m tests.simulate.mutants            run each until the simulator notices it; print the table
python -m tests.simulate.mutants --write    and put the table into docs/mutants.md
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forebay.kvstore.match as matching
from forebay.errors import CorruptChunk
from forebay.kvstore import lookup, reader
from forebay.kvstore.aside import Asides
from forebay.kvstore.cascade import Cascade
from forebay.kvstore.client.mapping import PoolMap
from forebay.kvstore.core import StoreCore
from forebay.kvstore.daemon import Daemon
from forebay.kvstore.header import SlotState, decode_header
from forebay.kvstore.index import ChunkTable
from forebay.kvstore.leases import Leases
from forebay.kvstore.placement import Placement
from forebay.kvstore.reader import Reader
from forebay.testing.simulate import worker
from forebay.testing.simulate.plan import draw_plan
from forebay.testing.simulate.world import simulate
from forebay.tiers import chunks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mutants.md"
BEGIN, END = "<!-- begin: generated -->\n", "<!-- end: generated -->\n"
SEEDS_MAX = 400

Mutant = Callable[[], AbstractContextManager[object]]
MUTANTS: dict[str, Mutant] = {}


def mutant(name: str) -> Callable[[Callable[[ExitStack], None]], Callable[[ExitStack], None]]:
    """Register a mutant: a function that enters its patches."""

    def register(enter: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
        @contextmanager
        def patched() -> Iterator[None]:
            with ExitStack() as stack:
                enter(stack)
                yield

        MUTANTS[name] = patched
        return enter

    return register


def replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Put `new` in place of what is there, which must be, and must take as many arguments: a mistake that is noticed
    because it can't be called shows nothing."""
    theirs, ours = (inspect.signature(function).parameters.values() for function in (getattr(owner, name), new))
    assert len(theirs) == len(ours) or any(p.kind is p.VAR_POSITIONAL for p in ours), f"{name} is called otherwise"
    stack.enter_context(patch.object(owner, name, new))


# --- reading -------------------------------------------------------------------------------------------


@mutant("pin-after-await")
def _pin_after_await(stack: ExitStack) -> None:
    async def late(self: Any, client: Any, prompt: Any, deadline_ms: int, wanted: Any) -> Any:
        found = lookup.match(self._core, prompt)
        found.hit()
        await asyncio.sleep(0.002)
        return reader.pin(self._core, client, found), {}, False

    replace(stack, Reader, "at_once", lambda self, client, prompt, deadline_ms: None)
    replace(stack, Reader, "lookup", late)


@mutant("generation-not-checked")
def _generation_not_checked(stack: ExitStack) -> None:
    replace(stack, PoolMap, "intact", lambda self, chunk: True)


@mutant("adopted-served-unread")
def _adopted_served_unread(stack: ExitStack) -> None:
    replace(stack, Reader, "_unverified", lambda self, found: [])


@mutant("window-left-out")
def _window_left_out(stack: ExitStack) -> None:
    served, needed = matching._served, matching.needed_positions
    replace(stack, matching, "_served", lambda g, have, ct, hit: served(g, have, ct, hit) if g.window is None else hit)
    replace(stack, lookup, "needed_positions", lambda g, ct, hit: needed(g, ct, hit) if g.window is None else range(0))


@mutant("one-group-ignored")
def _one_group_ignored(stack: ExitStack) -> None:
    longest = lookup.longest_hit
    replace(stack, lookup, "longest_hit", lambda groups, reach, ct, limit: longest(groups[:1], reach[:1], ct, limit))


# --- identity ------------------------------------------------------------------------------------------


@mutant("key-without-salt")
def _key_without_salt(stack: ExitStack) -> None:
    root_key = worker.root_key
    replace(stack, worker, "root_key", lambda namespace, salt=b"": root_key(namespace))


@mutant("extra-not-compared")
def _extra_not_compared(stack: ExitStack) -> None:
    order, place = ChunkTable._order, ChunkTable._place
    best = ChunkTable.best_child
    replace(stack, ChunkTable, "_order", lambda self, entry: (b"", order(self, entry)[1]))
    replace(stack, ChunkTable, "_place", lambda self, siblings, wanted: place(self, siblings, (b"", wanted[1])))
    replace(stack, ChunkTable, "best_child", lambda self, g, parent, tokens, extra: best(self, g, parent, tokens, b""))


@mutant("other-extra-superseded")
def _other_extra_superseded(stack: ExitStack) -> None:
    def shorter(self: Any, entry: Any, tokens: bytes, extra: bytes) -> list[Any]:
        siblings = self.children(entry.group, entry.parent)
        return [s for s in siblings if s is not entry and s.token_count < entry.token_count
                and tokens.startswith(s.header().tokens)]  # fmt: skip

    replace(stack, ChunkTable, "shorter", shorter)


# --- tiers ---------------------------------------------------------------------------------------------


@mutant("checksum-left-out")
def _checksum_left_out(stack: ExitStack) -> None:
    replace(stack, chunks, "verify_payload", lambda header, payload: None)


@mutant("slot-freed-at-deadline")
def _slot_freed_at_deadline(stack: ExitStack) -> None:
    let_go = Reader._let_go

    def freed(self: Any, loads: Any, held: Any) -> None:
        let_go(self, loads, held)
        for load in loads:
            if not load.done and load.waiters == 0:
                traffic = self._cascade.tiers[load.tier]
                traffic.loads = {job: other for job, other in traffic.loads.items() if other is not load}
                self._cascade.loading.pop(load.entry, None)
                self._arrivals.pop(load, None)
                load.done = True
                self._core.promotion_failed(load.entry)

    replace(stack, Reader, "_let_go", freed)


@mutant("answer-not-compared")
def _answer_not_compared(stack: ExitStack) -> None:
    def anything(self: Any, entry: Any, result: Any) -> Any:
        try:
            return decode_header(result.header) if result.ok else None
        except CorruptChunk:
            return None

    replace(stack, Cascade, "_acceptable", anything)


@mutant("forget-lost")
def _forget_lost(stack: ExitStack) -> None:
    replace(stack, Cascade, "came_too_late", lambda self, tier, result: None)


@mutant("cascade-uncapped")
def _cascade_uncapped(stack: ExitStack) -> None:
    replace(stack, Cascade, "_cap", lambda self, tier, length: float("inf"))


@mutant("waiters-share-one-pin")
def _waiters_share_one_pin(stack: ExitStack) -> None:
    finished = Cascade.finished

    def once(self: Any, tier_name: str, result: Any) -> Any:
        load = self.tiers[tier_name].loads.get(result.id)
        if load is None:
            return finished(self, tier_name, result)
        waiters, load.waiters = load.waiters, min(load.waiters, 1)
        try:
            return finished(self, tier_name, result)
        finally:
            load.waiters = waiters

    replace(stack, Cascade, "finished", once)


# --- the core ------------------------------------------------------------------------------------------


@mutant("generation-not-advanced")
def _generation_not_advanced(stack: ExitStack) -> None:
    stuck = property(lambda self: 1, lambda self, value: None)
    stack.enter_context(patch.object(StoreCore, "_generation", stuck, create=True))


@mutant("event-before-commit")
def _event_before_commit(stack: ExitStack) -> None:
    new_entry = StoreCore._new_entry

    def told(self: Any, *args: Any, **more: Any) -> Any:
        entry = new_entry(self, *args, **more)
        if entry is not None and entry.state is SlotState.RESERVED:
            self._announce(entry)
        return entry

    replace(stack, StoreCore, "_new_entry", told)


@mutant("retired-slot-reused")
def _retired_slot_reused(stack: ExitStack) -> None:
    unpin = StoreCore.unpin

    def retire(self: Any, entry: Any, reason: str) -> None:
        self.pins.forget(entry)
        self._withdraw(entry, reason)
        self._free(entry)

    def let_go(self: Any, entry: Any) -> None:
        if entry.state is SlotState.FREE:
            entry.pins -= 1
        else:
            unpin(self, entry)

    replace(stack, StoreCore, "retire", retire)
    replace(stack, StoreCore, "unpin", let_go)


@mutant("quarantine-skipped")
def _quarantine_skipped(stack: ExitStack) -> None:
    drop = StoreCore.drop_client
    replace(stack, StoreCore, "drop_client", lambda self, client, *, writing: drop(self, client, writing=False))


@mutant("abort-keeps-bytes")
def _abort_keeps_bytes(stack: ExitStack) -> None:
    abort = StoreCore.abort

    def kept(self: Any, client: Any, reservation: int) -> None:
        before = self.reserved_bytes
        abort(self, client, reservation)
        self.reserved_bytes = before

    replace(stack, StoreCore, "abort", kept)


@mutant("pinned-stays-evictable")
def _pinned_stays_evictable(stack: ExitStack) -> None:
    pinned, released = Placement.pinned, Placement.released

    def still_there(self: Any, entry: Any) -> None:
        self.busy[entry.slot.extent] += 1

    def there_again(self: Any, entry: Any) -> None:
        account = self._account(entry)
        if entry in list(account.policy) or entry in list(account.kept):
            self.busy[entry.slot.extent] -= 1
            pinned(self, entry)
        released(self, entry)

    replace(stack, Placement, "pinned", still_there)
    replace(stack, Placement, "released", there_again)


@mutant("owner-not-in-slot")
def _owner_not_in_slot(stack: ExitStack) -> None:
    new_entry = StoreCore._new_entry
    replace(stack, StoreCore, "_new_entry", lambda self, *args, **more: new_entry(self, *args[:-1], b"", **more))


@mutant("one-extent-too-many")
def _one_extent_too_many(stack: ExitStack) -> None:
    grow_all = Daemon._grow_all

    async def more(self: Any, core: Any, pool: Any, service: Any) -> None:
        await grow_all(self, core, pool, service)
        extent = max(core.place.slots.extents) + 1
        pool.create(extent)
        core.place.add_extent(extent, len(pool.map(extent)))
        for tier in service.tiers.values():
            tier.attach(extent, pool.descriptors[extent])

    replace(stack, Daemon, "_grow_all", more)


@mutant("replaced-not-told")
def _replaced_not_told(stack: ExitStack) -> None:
    withdraw = StoreCore._withdraw

    def silent(self: Any, entry: Any, reason: str) -> None:
        entry.announced &= reason != "replaced"
        withdraw(self, entry, reason)

    replace(stack, StoreCore, "_withdraw", silent)


@mutant("leases-outlive-connection")
def _leases_outlive_connection(stack: ExitStack) -> None:
    replace(stack, Leases, "_let_go", lambda self, client: iter(()))


@mutant("aside-not-kept")
def _aside_not_kept(stack: ExitStack) -> None:
    replace(stack, Asides, "keep", lambda self, hold, entry: hold is not None)


@mutant("aside-outlives-lease")
def _aside_outlives_lease(stack: ExitStack) -> None:
    replace(stack, Asides, "free", lambda self, aside: iter(()))


# --- running -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How a mutant was noticed: by which seed, as the how-manieth, and in which words."""

    seed: int
    seeds: int
    words: str


def noticed(name: str, seed: int) -> str | None:
    """In which words this seed fails with the mistake; None if it passes, or fails without it as well."""
    try:
        with MUTANTS[name]():
            simulate(draw_plan(seed))
    except Exception as error:
        simulate(draw_plan(seed))
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def hunt(name: str, seeds_max: int = SEEDS_MAX) -> Verdict | None:
    """Run seeds over the mutant until one fails that passes without it; None if none of them does."""
    for seed in range(seeds_max):
        words = noticed(name, seed)
        if words is not None:
            return Verdict(seed, seed + 1, words)
    return None


def known_seeds() -> dict[str, int]:
    """Which seed noticed each mutant when the page was written."""
    found = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(seed) for name, _, seed in found}


def table(verdicts: dict[str, Verdict | None]) -> str:
    """The page's table of results."""
    rows = ["| mutant | seeds until it was noticed | by seed | in which words |", "|---|---|---|---|"]
    for name, verdict in verdicts.items():
        found = "not noticed |" if verdict is None else f"{verdict.seeds} | {verdict.seed}"
        words = "" if verdict is None else verdict.words.replace("|", "\\|")[:110]
        rows.append(f"| `{name}` | {found} | {words} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate.mutants")
    parser.add_argument("--write", action="store_true", help="put the table into docs/mutants.md")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX)
    parser.add_argument("names", nargs="*", metavar="MUTANT")
    options = parser.parse_args()
    verdicts = {}
    for name in options.names or MUTANTS:
        verdicts[name] = hunt(name, options.seeds)
        print(name, verdicts[name], flush=True)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(before + BEGIN + table(verdicts) + END + after, encoding="utf-8")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
