"""Every kernel where all that Triton makes a constant of is one, if that may be: sizes, heads, strides; for sm_90."""

from __future__ import annotations

import torch

from forebay.kernels.ahead.cases import META, empty, exact
from forebay.kernels.ahead.record import recorded
from forebay.kernels.ahead.targets import TARGETS, compile_for
from forebay.kernels.choose import Choices
from forebay.kernels.experts import Activation, Stack
from forebay.kernels.gpu import attend, choose, experts, hot, indexer, latent, merge, move, norm, rotary, route, sparse
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.hot import Ask, Mirror, SwapPlan, new_regions
from forebay.kernels.lse import Lse
from forebay.kernels.moe import Routing
from forebay.kernels.moving import Pattern
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import ragged
from forebay.kernels.rotary import Turn


def launch_all() -> None:
    """Every launching function once."""
    where = ragged([1], [0], [1], torch.empty(1, 1, dtype=torch.int64, device=META))
    pool, latents = empty(1, 1, 2, 1, 16, 64), empty(1, 1, 1, 1, 16, 96)
    attend.attend(empty(1, 4, 64), pool, 0, where, Scores(0.1, window=1), Tiling(16, 32, 2))
    attend.attend(empty(1, 1, 64), pool, 0, where, Scores(1.0, cap=1.0), Tiling(16, 32, 1))
    latent.attend_latents(empty(1, 1, 96), latents, 0, where, Scores(0.1), rank=64, tiling=Tiling(16, 16, 2))
    one = empty(1, 1, dtype=torch.int64)
    sparse.attend_chosen(empty(1, 1, 96), latents, 0, one, 0.1, rank=64, tiling=Tiling(16, 16, 1))
    indexer.score_keys(empty(1, 1, 16), exact(1, 1), empty(1, 1, 1, 1, 16, 16), 0, one, one[0], one[0], 1)
    indexer.pick_columns(exact(1, 1), 1)
    merge.merge(exact(1, 1, 1, 1), Lse(exact(1, 1, 1), "2"), torch.bfloat16)
    norm.add_norm(exact(1, 1), None, exact(1), 1e-6, torch.bfloat16)
    rotary.rotate_(empty(1, 1, 2), Turn(exact(1, 1), exact(1, 1), pairs=True))
    byte, at = torch.empty(1, dtype=torch.uint8, device=META), torch.tensor([0])
    move.move(Pattern(1, (), (), (), at, at), byte, byte, store=True)
    double = empty(1, dtype=torch.float64)
    choose.choose(exact(1, 1), Choices(double, empty(1, dtype=torch.int32), double, double))
    route.route(exact(1, 1), Routing(1))
    chosen = empty(1, 1, dtype=torch.int64)
    order = route.sort_choices(chosen, 1, 16)
    experts.expert_products(empty(1, 1), Stack(empty(1, 1, 1)), chosen, order, Sizes(), dtype=torch.bfloat16)
    experts.activate(empty(1, 2), Activation("situ", beta=1.0))
    experts.sum_choices(exact(1, 1), 1, torch.float32)
    mirror, flags = Mirror(byte, one[0]), one[0]
    hot.resolve_and_copy(new_regions(1, 16, META), Ask(one[None], flags, one, one), mirror, latents, 0)
    hot.replay(SwapPlan(one, one, one, flags, flags), mirror, latents, 0)


if __name__ == "__main__":
    with recorded() as launches:
        launch_all()
    for launch in launches:
        compile_for(launch, TARGETS["sm_90"])
        print(launch.name)
