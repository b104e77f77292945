"""The MLP of a layer with experts: a router, the experts, and perhaps an expert that every token goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.dispatch import dispatch
from forebay.kernels.moe import Routes, Routing, route
from forebay.models.config import Config
from forebay.models.expert_parallel import DealtExperts
from forebay.models.expert_weights import GatedExperts
from forebay.models.experts import Experts
from forebay.models.layers import accumulate_dtype
from forebay.models.ranks import ALONE, Ranks
from forebay.models.standard import dense_mlp
from forebay.models.weights import Weights

MLP = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Scores experts by `weight` [experts, hidden] and `bias` [experts], in the accumulation dtype.

    `choice_bias` [experts] takes part in the choice only.
    """

    weight: Tensor
    routing: Routing
    bias: Tensor | None = None
    choice_bias: Tensor | None = None


class MoE:
    """The weighted sum of the chosen experts' outputs, and `shared`'s on top.

    With several `ranks` each has a part of every expert's columns: they route alike, and sum once, at the end. Or each
    has some of the experts, whole: `expert_parallel.py`.
    """

    def __init__(self, router: Router, experts: Experts, shared: MLP | None = None, ranks: Ranks = ALONE) -> None:
        self._router, self._experts, self._shared, self._ranks = router, experts, shared, ranks
        dealt = ranks.experts != "inside"
        self._dealt = DealtExperts(experts, len(router.weight), ranks) if dealt else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden] in the accumulation dtype."""
        if self._dealt is not None:
            return self._dealt(x, self._route, self._shared)
        mixed = self._experts(x, self._route(x))
        return self._ranks.sum(mixed if self._shared is None else mixed.add_(self._shared(x)))

    def _route(self, x: Tensor) -> Routes:
        router = self._router
        logits = F.linear(x.to(accumulate_dtype(x.dtype)), router.weight, router.bias)
        if dispatch().choose("route", logits, logits) == "triton":
            from forebay.kernels import forms

            return forms.route(logits, router.routing, router.choice_bias)
        return route(logits, router.routing, router.choice_bias)


def refuse_other_routers(config: Config) -> None:
    """Raise UnsupportedArchitecture for a router other than sigmoid with a bias for the choice."""
    if config.text("scoring_func", "sigmoid") != "sigmoid" or config.text("topk_method", "noaux_tc") != "noaux_tc":
        raise config.unsupported("a router other than sigmoid with noaux_tc is not supported in this family")


def check_routing(config: Config, routing: Routing, experts: int) -> Routing:
    """`routing` itself, if so many experts can be routed so. Raises CheckpointBroken."""
    of_group = experts // routing.groups
    if experts % routing.groups or routing.kept_groups > routing.groups:
        raise config.broken(f"{experts} experts in {routing.groups} groups, {routing.kept_groups} kept, don't fit")
    if routing.groups > 1 and routing.group_worth == "top2" and of_group < 2:
        raise config.broken(f"{of_group} expert in a group has no best two")
    if routing.top_k > of_group * routing.kept_groups:
        raise config.broken(f"{routing.top_k} experts a token of {of_group * routing.kept_groups} that can be chosen")
    return routing


def gated_moe(weights: Weights, router: Router, where: GatedExperts) -> MoE:
    """Experts with a gate, and perhaps an MLP that every token goes to."""
    experts, shared = where.read(weights)
    return MoE(router, experts, shared, weights.ranks)


def sparse_mlp(
    config: Config, weights: Weights, index: int, routing: Routing, *, dense_layers: int, shared: int = 1,
    bias: bool = False,
) -> MLP:  # fmt: skip
    """Layer `index`'s MLP as DeepSeek and GLM have it: the first layers dense, then routed and shared experts.

    `dense_layers` and `shared` are the family's defaults of how many are dense, and how many experts every token goes
    to; `bias` is of dense and shared ones. With a sigmoid
    router there is a bias for the choice.
    """
    at, hidden = f"layers.{index}.mlp", config.size("hidden_size")
    if index < config.count("first_k_dense_replace", dense_layers):
        return dense_mlp(weights, at, hidden, config.size("intermediate_size"), bias=bias)
    experts, ffn = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    biased = routing.score == "sigmoid"
    router = Router(
        weights.exact(f"{at}.gate.weight", experts, hidden),
        check_routing(config, routing, experts),
        choice_bias=weights.exact(f"{at}.gate.e_score_correction_bias", experts) if biased else None,
    )
    where = GatedExperts(
        f"{at}.experts", experts, hidden, ffn,
        shared_at=f"{at}.shared_experts", shared=config.count("n_shared_experts", shared), shared_bias=bias,
    )  # fmt: skip
    return gated_moe(weights, router, where)
