"""Devices that kernels are compiled for, and Triton's compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forebay.errors import ConfigError
from forebay.kernels.ahead.record import Launch


@dataclass(frozen=True, slots=True)
class Target:
    """A device by the name of its instruction set. `native_mx`: its tensor cores take MXFP4 as it is. `fnuz`: its FP8
    is the older AMD one."""

    name: str
    device: str
    triton: GPUTarget
    native_mx: bool = False
    fnuz: bool = False


TARGETS = {
    target.name: target
    for target in (
        Target("sm_90", "NVIDIA H100, H200", GPUTarget("cuda", 90, 32)),
        Target("sm_100", "NVIDIA B200", GPUTarget("cuda", 100, 32), native_mx=True),
        Target("gfx942", "AMD MI300X, MI325X", GPUTarget("hip", "gfx942", 64), fnuz=True),
        Target("gfx950", "AMD MI355X", GPUTarget("hip", "gfx950", 64), native_mx=True),
    )
}


def target_of(name: str) -> Target:
    """Raises ConfigError for one that isn't known."""
    if name not in TARGETS:
        raise ConfigError(f"target {name!r} is none of {', '.join(TARGETS)}")
    return TARGETS[name]


def compile_for(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel, from its cache if it is there. Raises what Triton raises if it can't be compiled."""
    places = {name: at for at, name in enumerate(launch.kernel.arg_names)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in launch.aligned}
    constants = {(places[name],): value for name, value in launch.constants.items()}
    source = ASTSource(launch.kernel, launch.signature, constants, attributes)
    return triton.compile(source, target=target.triton, options=launch.options)
