"""Settings of other models. Whoever gives one another value than its neutral one wants something that most families
here don't compute, and to leave it out would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forebay.models.config import Config

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "layernorm_full_attention_alpha": (1.0,),
    "layernorm_full_attention_beta": (1.0,),
    "layernorm_mlp_alpha": (1.0,),
    "layernorm_mlp_beta": (1.0,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": ([],),
    "num_kv_shared_layers": (0,),
    "residual_multiplier": (1.0,),
    "scale_depth": (),
    "scale_emb": (1.0,),
    "sliding_window": (),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
}
"""By name the values that change nothing, beside null."""


def refuse_foreign(config: Config, computed: Collection[str] = (), kind: str = "full_attention") -> None:
    """Raise UnsupportedArchitecture for the first such setting that the family hasn't `computed` itself, and unless
    all layers are of this `kind`."""
    for name, neutral in _NEUTRAL.items():
        if name not in computed and name in config and config.get(name) not in neutral:
            raise config.unsupported(f"{name} = {config.get(name)!r} is not supported in this family")
    kinds = config.get("layer_types", [])
    if "layer_types" not in computed and (not isinstance(kinds, list) or set(map(str, kinds)) - {kind}):
        raise config.unsupported(f"layer_types other than {kind} are not supported in this family")
