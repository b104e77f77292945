"""`python -m tests.ranks.sums FOLDER RANK SIZE`: sums and gathers as ranks do; prints a digest of what came of it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from forebay.workers.ranks.group import ProcessRanks
from forebay.workers.ranks.network import ranks_interface, use_interface


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
    ranks.part()
    print(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
