"""`python -m tests.ranks.dealing MODELS FOLDER RANK SIZE`: every family with experts, these dealt out in both ways.
Rank 0 prints the tokens that were chosen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from forebay.models.loading import load_model
from forebay.models.parallel import Parallel
from forebay.models.ranks import ALONE, Ranks
from forebay.workers.ranks.group import ProcessRanks
from forebay.workers.ranks.network import ranks_interface, use_interface
from tests import checkpoints
from tests.parity.reference import Runner

SPARSE = ("qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "glm4_moe")
PIECES = (17, 4, 1, 1)


def greedy_alone(path: Path) -> list[int]:
    """The likeliest token behind each of a prompt, by one process that has all experts."""
    return greedy(path, ALONE)


def greedy(path: Path, ranks: Ranks) -> list[int]:
    """The same with other ranks; nothing but on the first."""
    ids = torch.randint(4, checkpoints.VOCAB, (sum(PIECES),), generator=torch.Generator().manual_seed(2)).tolist()
    runner = Runner(load_model(path, dtype=torch.float64, device=torch.device("cpu"), ranks=ranks), blocks=4)
    found: list[int] = []
    for count in PIECES:
        piece, ids = ids[:count], ids[count:]
        found += runner.step({0: piece}).argmax(dim=1).tolist()
    return found


def main(models: str, folder: str, rank: int, size: int) -> None:
    """Both ways over one group of processes."""
    torch.set_num_threads(1)
    use_interface(ranks_interface(None, {}))
    ranks = ProcessRanks(rank, size, Parallel(tp=size, experts="gathered"))
    ranks.meet(Path(folder), torch.device("cpu"), 60.0)
    found = {f"{name} gathered": greedy(Path(models) / name, ranks) for name in SPARSE}
    ranks.parallel = Parallel(tp=size, experts="exchanged")
    found |= {f"{name} exchanged": greedy(Path(models) / name, ranks) for name in SPARSE}
    assert ranks.traffic.sent["experts"].bytes > 0
    ranks.part()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
