"""The collectives of ranks that share out positions or prompts, over torch.distributed; what they send is counted."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from forebay.kernels.dealing import Dealing
from forebay.models.parallel import Parallel
from forebay.models.traffic import Backend, Traffic


class _Among:
    """Some of a worker's ranks. `meet` comes before the first collective, all are called from one thread."""

    def __init__(self, size: int, traffic: Traffic) -> None:
        self.size, self.traffic = size, traffic
        self._group: dist.ProcessGroup | None = None

    def meet(self, group: dist.ProcessGroup | None) -> None:
        """Say which processes they are (None: all), in the order of their ranks."""
        self._group = group

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, of equal shapes: [size, *x.shape]."""
        x = x.contiguous()
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather_single(found.view(-1), x.view(-1), group=self._group)
        return found


class ProcessPrompts(_Among):
    """See `forebay.models.prompts.Prompts`."""

    def __init__(self, parallel: Parallel, rank: int, traffic: Traffic) -> None:
        super().__init__(parallel.pcp, traffic)
        self.rank = parallel.prefill_rank(rank)


class ProcessContext(_Among):
    """See `forebay.models.context.Context`."""

    prefill: Literal["auto"] = "auto"

    def __init__(self, parallel: Parallel, rank: int, traffic: Traffic) -> None:
        super().__init__(parallel.dcp, traffic)
        self.dealing: Dealing = parallel.dealing(rank)
        self.backend: Backend = parallel.backend
        self.replicated = parallel.replicated

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Context`."""
        found = x.new_empty(x.shape[1:])
        dist.reduce_scatter_single(found.view(-1), x.contiguous().view(-1), group=self._group)
        return found

    def all_to_all(self, x: Tensor) -> Tensor:
        """See `Context`."""
        x = x.contiguous()
        found = x.new_empty(x.shape)
        dist.all_to_all_single(found, x, group=self._group)
        return found
