"""The collectives of ranks that share out a sequence's positions, over torch.distributed; what they send is counted."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from forebay.kernels.dealing import Dealing
from forebay.models.parallel import Parallel
from forebay.models.traffic import Backend, Traffic


class ProcessContext:
    """See `forebay.models.context.Context`, which says what its members are. `meet` comes before the first collective,
    all are called from one thread."""

    prefill: Literal["auto"] = "auto"

    def __init__(self, parallel: Parallel, rank: int, traffic: Traffic) -> None:
        self.dealing: Dealing = parallel.dealing(rank)
        self.backend: Backend = parallel.backend
        self.replicated = parallel.replicated
        self.traffic = traffic
        self._group: dist.ProcessGroup | None = None

    def meet(self, group: dist.ProcessGroup | None) -> None:
        """Say which processes they are (None: all), in the order of their ranks."""
        self._group = group

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Context`."""
        x = x.contiguous()
        found = x.new_empty(self.dealing.size, *x.shape)
        dist.all_gather_single(found.view(-1), x.view(-1), group=self._group)
        return found

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
