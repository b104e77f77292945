"""What a launch would compile, without launching: kernels are called on meta tensors, and the arguments kept.

Triton compiles for the types of the arguments, for whether integers are 1 or multiples of 16, and for constants. The
same is derived here from the same arguments, so what is compiled ahead of time is what would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel, the types of what it is given (`signature`, by name), its `constants`, the names of arguments that are
    multiples of 16, and its options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's."""
        found: str = self.kernel.fn.__name__
        return found


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, kernels aren't run but written down, in their order. Raises AssertionError if Triton interprets."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(kernel, args, kwargs))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    assert isinstance(kernel, JITFunction), f"{kernel} is interpreted: nothing of it would be compiled"
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert set(given) == set(kernel.arg_names), set(given) ^ set(kernel.arg_names)
    fixed = {param.name for param in kernel.params if param.is_constexpr}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for name in kernel.arg_names:
        value = given[name]
        if name in fixed or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = type_of(value)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned.append(name)
    return Launch(kernel, signature, constants, tuple(aligned), options)


def type_of(value: object) -> str:
    """What Triton calls the type of an argument."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"
