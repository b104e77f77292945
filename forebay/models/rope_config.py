"""Rotary settings from a configuration, in the newer form and the older one. What isn't understood is refused."""

from __future__ import annotations

from forebay.models.config import Config
from forebay.models.rope import DynamicScaling, Llama3Scaling, Rope, YarnScaling, yarn_magnitude

_ANY = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_ORIGINAL = "original_max_position_embeddings"
_FIELDS = {
    "default": set(),
    "linear": {"factor", _ORIGINAL},
    "dynamic": {"factor", _ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {
        "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", _ORIGINAL,
    },
    "factors": {"factors"},
}  # fmt: skip
"""By how positions are stretched, the settings that are read. `finetuned` says nothing about what is computed."""


def rope_settings(config: Config, settings: Config | None = None) -> Config:
    """The table that says how positions are stretched: `rope_parameters` (or `settings`), else `rope_scaling`.

    Raises UnsupportedArchitecture for a setting in either that isn't read here, and where the two differ.
    """
    newer = config.section("rope_parameters") if settings is None else settings
    older = config.section("rope_scaling")
    found, other = (newer, older) if _is_typed(newer) else (older, newer)
    kind = _kind(found)
    if kind not in _FIELDS:
        raise config.unsupported(f"rotary scaling of type {kind!r} is not supported")
    unknown = (found.names() | other.names()) - _ANY - _FIELDS[kind]
    if unknown:
        raise config.unsupported(f"the rotary setting {min(unknown)!r} is not supported with type {kind!r}")
    told = other.names() - _ANY
    if (_is_typed(other) and _kind(other) != kind) or any(other.get(name) != found.get(name) for name in told):
        raise config.unsupported("rope_parameters and rope_scaling that differ are not supported")
    return found


def _is_typed(table: Config) -> bool:
    return "rope_type" in table or "type" in table


def _kind(table: Config) -> str:
    return table.text("rope_type", table.text("type", "default"))


def read_rope(
    config: Config, head_dim: int, *, theta: float, settings: Config | None = None, partial: float | None = None
) -> Rope:
    """From `rope_parameters` (or `settings`), else from `rope_theta` and `rope_scaling`.

    `theta` is the default base. `partial` is the default share of a head that is rotated; None means that the family
    rotates all of it. Raises CheckpointBroken or UnsupportedArchitecture.
    """
    scaling = rope_settings(config, settings)
    if settings is None:
        settings = config.section("rope_parameters")

    def number(name: str, default: float) -> float:
        return settings.number(name, scaling.number(name, config.number(name, default)))

    base, share = number("rope_theta", theta), number("partial_rotary_factor", partial or 1.0)
    if partial is None and share != 1.0:
        raise config.unsupported("a rotation of only some dimensions is not supported in this family")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise config.broken(f"partial_rotary_factor {share} of a head of {head_dim} is no even number of dimensions")
    return _with_scaling(config, scaling, Rope(base, dim))


def _with_scaling(config: Config, scaling: Config, rope: Rope) -> Rope:
    base, dim = rope.theta, rope.dim
    match _kind(scaling):
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
            if scaling.size(_ORIGINAL, original) != original:
                raise config.unsupported(f"dynamic scaling with an {_ORIGINAL} of its own is not supported")
            return Rope(base, dim, dynamic=DynamicScaling(scaling.number("factor"), original))
        case _:
            factors = scaling.get("factors")
            if not isinstance(factors, list) or len(factors) != dim // 2:
                raise config.broken(f"factors must be a list of {dim // 2} numbers")
            return Rope(base, dim, factors=tuple(float(factor) for factor in factors))


def _llama3(config: Config, scaling: Config) -> Llama3Scaling:
    stretch = Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_context=_original_context(config, scaling),
    )
    if stretch.high_freq_factor <= stretch.low_freq_factor:
        raise config.broken("high_freq_factor must be above low_freq_factor")
    return stretch


def _yarn(config: Config, scaling: Config) -> YarnScaling:
    original = _original_context(config, scaling)
    factor = scaling.number("factor", config.size("max_position_embeddings") / original)
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        magnitude=scaling.number("attention_factor", _magnitude(scaling, factor)),
    )


def _original_context(config: Config, scaling: Config) -> int:
    """Tokens. What is said outside of the rotary settings counts, as it does in transformers."""
    inside = scaling.size(_ORIGINAL, config.size(_ORIGINAL, config.size("max_position_embeddings")))
    return config.size(_ORIGINAL, inside)


def _magnitude(scaling: Config, factor: float) -> float:
    """Of rotated vectors. With both strengths given, only what they differ by: the rest is in the scores' scale."""
    strength, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if strength and of_all:
        of_both = scaling.number("mscale"), scaling.number("mscale_all_dim")
        return yarn_magnitude(factor, of_both[0]) / yarn_magnitude(factor, of_both[1])
    return yarn_magnitude(factor)
