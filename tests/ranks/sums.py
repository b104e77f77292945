"""`python -m tests.ranks.sums FOLDER RANK SIZE`: sums, gathers and exchanges as ranks do; prints a digest of it all."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from forebay.workers.ranks.group import ProcessRanks
from forebay.workers.ranks.network import ranks_interface, use_interface


def exchanges(ranks: ProcessRanks) -> bytes:
    """Rows told apart by who gave them, and to whom; what every rank should have in the end, as bytes."""
    rank, size = ranks.rank, ranks.size
    whole = ranks.gather_all(torch.full((2, 1), float(rank)).to(torch.float8_e4m3fn))
    assert whole.float().flatten().tolist() == [float(r) for r in range(size) for _ in range(2)]
    # Rank r gives r + 1 rows to those behind itself and none to the others: some give nothing, some take nothing.
    given = [rank + 1 if to > rank else 0 for to in range(size)]
    taken = [of + 1 if of < rank else 0 for of in range(size)]
    rows = torch.tensor([[rank, to] for to in range(size) for _ in range(given[to])], dtype=torch.int64).view(-1, 2)
    found = ranks.exchange(rows, given, taken)
    assert found.tolist() == [[of, rank] for of in range(size) for _ in range(taken[of])]
    # Only in the order of the ranks does it come to this: 1 + 2^24 - 2^24 is 0 in fp32, and 2^24 - 2^24 + 1 is 1.
    values = {0: 1.0, 1: 2.0**24, 2: -(2.0**24)}
    part = ranks.sum_parts(torch.full((size * 2, 3), values.get(rank, 0.0)))
    assert part.shape == (2, 3) and part.unique().tolist() == [{1: 1.0, 2: 2.0**24, 3: 0.0}[size]]
    return part.numpy().tobytes()


def main(folder: str, rank: int, size: int) -> None:
    """Three dtypes, sizes from one value to more than a buffer, then a gather."""
    torch.set_num_threads(1)
    use_interface(ranks_interface(None, {}))
    ranks = ProcessRanks(rank, size)
    ranks.meet(Path(folder), torch.device("cpu"), 60.0)
    rng = torch.Generator().manual_seed(rank)
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (1, 7, 1000, 300_001):
            found = ranks.sum(torch.randn(count, generator=rng).to(dtype))
            digest.update(found.view(torch.uint8).numpy().tobytes())
    whole = ranks.gather(torch.full((2, 3), float(rank)))
    if rank == 0:
        assert whole is not None and whole.tolist() == [[float(r) for r in range(size) for _ in range(3)]] * 2
    else:
        assert whole is None
    digest.update(exchanges(ranks))
    ranks.part()
    print(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
