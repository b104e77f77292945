"""Rotary settings from a configuration, in the newer form and the older one."""

from __future__ import annotations

from forebay.models.config import Config
from forebay.models.rope import DynamicScaling, Llama3Scaling, Rope, YarnScaling, yarn_magnitude


def read_rope(
    config: Config, head_dim: int, *, theta: float, settings: Config | None = None, partial: float | None = None
) -> Rope:
    """From `rope_parameters` (or `settings`), else from `rope_theta` and `rope_scaling`.

    `theta` is the default base. `partial` is the default share of a head that is rotated; None means that the family
    rotates all of it. Raises CheckpointBroken or UnsupportedArchitecture.
    """
    if settings is None:
        settings = config.section("rope_parameters")
    scaling = settings if "rope_type" in settings else config.section("rope_scaling")
    base = settings.number("rope_theta", config.number("rope_theta", theta))
    share = settings.number("partial_rotary_factor", config.number("partial_rotary_factor", partial or 1.0))
    if partial is None and share != 1.0:
        raise config.unsupported("a rotation of only some dimensions is not supported in this family")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise config.broken(f"partial_rotary_factor {share} of a head of {head_dim} is no even number of dimensions")
    return _with_scaling(config, scaling, Rope(base, dim))


def _with_scaling(config: Config, scaling: Config, rope: Rope) -> Rope:
    base, dim = rope.theta, rope.dim
    match scaling.text("rope_type", scaling.text("type", "default")):
        case "default":
            return rope
        case "linear":
            return Rope(base, dim, linear=scaling.number("factor"))
        case "llama3":
            return Rope(base, dim, llama3=_llama3(config, scaling))
        case "yarn":
            return Rope(base, dim, yarn=_yarn(config, scaling))
        case "dynamic":
            if dim == 2:
                raise config.broken("dynamic rotary scaling needs more than two dimensions")
            original = config.size("max_position_embeddings")
            return Rope(base, dim, dynamic=DynamicScaling(scaling.number("factor"), original))
        case "factors":
            factors = scaling.get("factors")
            if not isinstance(factors, list) or len(factors) != dim // 2:
                raise config.broken(f"factors must be a list of {dim // 2} numbers")
            return Rope(base, dim, factors=tuple(float(factor) for factor in factors))
        case kind:
            raise config.unsupported(f"rotary scaling of type {kind!r} is not supported")


def _llama3(config: Config, scaling: Config) -> Llama3Scaling:
    stretch = Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_context=scaling.size("original_max_position_embeddings"),
    )
    if stretch.high_freq_factor <= stretch.low_freq_factor:
        raise config.broken("high_freq_factor must be above low_freq_factor")
    return stretch


def _yarn(config: Config, scaling: Config) -> YarnScaling:
    positions = config.size("max_position_embeddings")
    original = scaling.size("original_max_position_embeddings", positions)
    factor = scaling.number("factor", positions / original)
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        magnitude=scaling.number("attention_factor", _magnitude(scaling, factor)),
    )


def _magnitude(scaling: Config, factor: float) -> float:
    """Of rotated vectors. With both strengths given, only what they differ by: the rest is in the scores' scale."""
    strength, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if strength and of_all:
        of_both = scaling.number("mscale"), scaling.number("mscale_all_dim")
        return yarn_magnitude(factor, of_both[0]) / yarn_magnitude(factor, of_both[1])
    return yarn_magnitude(factor)
