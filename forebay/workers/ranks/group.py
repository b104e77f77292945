"""The collectives of one model's ranks, over torch.distributed: tensors only, nothing is pickled.

They meet by a file in a private directory, which is removed once they have: from then on they are connected.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.errors import NotWritable
from forebay.models.parallel import ExpertSplit, Parallel
from forebay.models.traffic import Traffic
from forebay.workers.ranks.context import ProcessContext, ProcessPrompts

STORE_FILE = "ranks"


class ProcessRanks:
    """See `forebay.models.ranks.Ranks`. `meet` comes before the first collective; all are called from one thread."""

    def __init__(self, process: int, size: int, parallel: Parallel | None = None) -> None:
        """`process` is the rank among all processes, of which there are `size`; with several sets of tensor parallel
        ranks, `rank` and `size` are those in its set."""
        self.parallel = parallel or Parallel(tp=size)
        assert self.parallel.size == size, (self.parallel, size)
        self._process, self._processes = process, size
        self._rank, self._size = self.parallel.tensor_rank(process), self.parallel.tp
        self._group: dist.ProcessGroup | None = None
        self.traffic = Traffic()
        shares = self.parallel.dcp > 1
        self.context = ProcessContext(self.parallel, process, self.traffic) if shares else None
        self.prompts = ProcessPrompts(self.parallel, process, self.traffic) if self.parallel.pcp > 1 else None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def experts(self) -> ExpertSplit:
        """How experts are shared among them."""
        return self.parallel.experts

    def meet(self, folder: Path, device: torch.device, collective_s: float) -> None:
        """Connect with the other ranks, which do the same. Blocks; raises what torch raises if they don't come, and so
        does every collective that takes longer than `collective_s`: a rank is stopped then, or hangs."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = dist.FileStore(str(folder / STORE_FILE), self._processes)
        dist.init_process_group(
            backend, store=store, rank=self._process, world_size=self._processes,
            timeout=timedelta(seconds=collective_s),
        )  # fmt: skip
        self._group = self._among(lambda rank: [rank - rank % self._size + step for step in range(self._size)])
        # The first collective connects: afterwards nobody needs the folder.
        self.sum(torch.zeros(1, device=device))
        for some, members in ((self.context, self.parallel.sharing), (self.prompts, self.parallel.reading)):
            if some is not None:
                some.meet(self._among(members))
                some.all_gather(torch.zeros(1, device=device))

    def _among(self, members: Callable[[int], list[int]]) -> dist.ProcessGroup | None:
        """The group of this process, `members` saying who is in whose. All make all groups, in the same order."""
        groups = {tuple(members(process)): None for process in range(self._processes)}
        if len(groups) == 1:
            return None
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        mine: dist.ProcessGroup = made[tuple(members(self._process))]
        return mine

    def part(self) -> None:
        """End what `meet` began. No collective may be under way."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        self.traffic.add("sum", x.numel() * x.element_size())
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """See `Ranks`."""
        self.traffic.add("logits", x.numel() * x.element_size() if self._rank else 0)
        first = self._process - self._rank
        if self._rank:
            dist.gather(x, dst=first, group=self._group)
            return None
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.gather(x, parts, dst=first, group=self._group)
        return torch.cat(parts, dim=1)

    def gather_all(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        self.traffic.add("experts", (self._size - 1) * x.numel() * x.element_size())
        out = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        dist.all_gather_single(_sendable(out), _sendable(x.contiguous()), group=self._group)
        return out

    def sum_parts(self, x: Tensor) -> Tensor:
        """See `Ranks`. Each rank adds up by itself: a backend's own order of summing isn't told."""
        count = x.shape[0] // self._size
        parts = self.exchange(x, [count] * self._size, [count] * self._size).split(count)
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        return total

    def exchange(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """See `Ranks`."""
        self.traffic.add("experts", (len(x) - given[self._rank]) * x[:1].numel() * x.element_size())
        out = x.new_empty(sum(taken), *x.shape[1:])
        dist.all_to_all_single(_sendable(out), _sendable(x.contiguous()), list(taken), list(given), group=self._group)
        return out


def _sendable(x: Tensor) -> Tensor:
    """The same memory; FP8, which gloo doesn't know, as bytes."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


@contextmanager
def rendezvous(socket: Path) -> Iterator[Path]:
    """A private directory beside a worker's socket, which is ours: what a killed worker left there is removed first.

    Raises NotWritable.
    """
    folder = socket.with_name(f"{socket.name}.ranks")
    try:
        if folder.exists() or folder.is_symlink():
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise NotWritable(f"{folder} is no directory; remove it, or choose another --listen")
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise NotWritable(f"can't use {folder} for ranks to meet: {error.strerror}; choose another --listen") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
