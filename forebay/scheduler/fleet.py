"""The workers that may take requests, as arrays: one entry a worker, in a fixed order until the fleet changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forebay.scheduler.places import TIERS, Holders, Tier

Seconds = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker was measured to do. All in seconds a token, `latency_s` in seconds a load.

    `prefill_s` is for a prompt's first tokens; at `attention_tokens` attention costs as much again (0: it never
    does). `load_s` has one entry a tier; that of the device is 0. `move_s` is for what another store has.
    `decode_slows` is by how much of itself a prefill is slowed for each stream that decodes beside it.
    `overlaps` says that the engine computes a prefix's front while it loads its back; one that doesn't takes the
    better of the two.
    """

    prefill_s: float = 1e-4
    attention_tokens: float = 0.0
    load_s: tuple[float, float, float, float] = (0.0, 5e-6, 2e-5, 4e-5)
    move_s: float = 2e-5
    latency_s: float = 0.002
    decode_slows: float = 0.0
    overlaps: bool = True


@dataclass(frozen=True, slots=True)
class Worker:
    """One place to send requests to. `store` is the owner that it shares with others, None for none."""

    name: str
    store: str | None = None
    block_tokens: int = 16
    rates: Rates = field(default_factory=Rates)


class Fleet:
    """Workers and what they can reach, for arrays. Immutable; a changed cluster is a new fleet."""

    def __init__(self, workers: Sequence[Worker], holders: Holders) -> None:
        assert workers, "a fleet has at least one worker"
        self.workers = tuple(workers)
        self.index_of = {worker.name: at for at, worker in enumerate(self.workers)}
        self.stores = list(dict.fromkeys(worker.store for worker in workers if worker.store is not None))
        places = {store: at for at, store in enumerate(self.stores)}
        self.store_of: Numbers = np.array([-1 if w.store is None else places[w.store] for w in workers], np.int64)
        own = [holders.all_of(worker.name) for worker in workers]
        kept = [holders.all_of(store) for store in self.stores]
        every = np.array(kept, np.int64).reshape(-1, TIERS)
        # One more than every holder: a column that nobody has.
        self.nobody = holders.count
        nothing = [self.nobody] * TIERS
        self.own: Numbers = np.array(own, np.int64)
        self.shared: Numbers = np.array([kept[at] if at >= 0 else nothing for at in self.store_of], np.int64)
        self.kept: Numbers = every[:, (Tier.HOST, Tier.DISK)]
        # The same for loops that go by owners: an owner's tiers are consecutive numbers.
        self.owners = holders.count // TIERS
        self.own_owner: Numbers = np.ascontiguousarray(self.own[:, 0]) // TIERS
        self.store_owner: Numbers = np.ascontiguousarray(self.shared[:, 0]) // TIERS
        self.kept_owner: Numbers = np.ascontiguousarray(every[:, 0]) // TIERS
        self.block_tokens: Numbers = np.array([worker.block_tokens for worker in workers], np.int64)
        self.sizes = sorted(set(self.block_tokens.tolist()))
        self._set_rates([worker.rates for worker in workers])

    def __len__(self) -> int:
        return len(self.workers)

    def _set_rates(self, rates: Sequence[Rates]) -> None:
        self.prefill_s: Seconds = np.array([rate.prefill_s for rate in rates], np.float64)
        self.attention: Seconds = np.array([rate.attention_tokens or np.inf for rate in rates], np.float64)
        self.load_s: Seconds = np.array([rate.load_s for rate in rates], np.float64)
        self.move_s: Seconds = np.array([rate.move_s for rate in rates], np.float64)
        self.latency_s: Seconds = np.array([rate.latency_s for rate in rates], np.float64)
        self.decode_slows: Seconds = np.array([rate.decode_slows for rate in rates], np.float64)
        self.overlaps: npt.NDArray[np.bool_] = np.array([rate.overlaps for rate in rates])
        self.all_overlap = bool(self.overlaps.all())
