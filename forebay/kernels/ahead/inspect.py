"""What a compiled kernel takes of a device: read from its code, since no device is asked."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

_CUDA_TENSOR = re.compile(r"\b(wgmma)\.mma_async|\b(tcgen05)\.mma\.[^;]*?kind::(\w+)|\b(mma)\.sync")
_CUDA_USE = re.compile(r"REG:(\d+) STACK:(\d+)")
_AMD_TENSOR = re.compile(r"\bv_(s?mfma(?:_scale)?)_")
_AMD_USE = {
    "vgprs": re.compile(r"\.vgpr_count:\s+(\d+)"),
    "stack": re.compile(r"\.private_segment_fixed_size:\s+(\d+)"),
}


@dataclass(frozen=True, slots=True)
class Built:
    """`registers` of a thread; `stack` bytes of a thread, where what doesn't fit into registers goes; `shared` bytes of
    a program; `tensor`: the kind of tensor instructions in it, empty if there are none."""

    registers: int
    stack: int
    shared: int
    tensor: str


def inspect(compiled: Any) -> Built:
    """Blocks for cuobjdump, where the target is NVIDIA's."""
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        registers, stack = _cuda_use(compiled.asm["cubin"])
        return Built(registers, stack, shared, _kinds(_CUDA_TENSOR, compiled.asm["ptx"]))
    text = compiled.asm["amdgcn"]
    use = {name: int(_found(pattern, text).group(1)) for name, pattern in _AMD_USE.items()}
    return Built(use["vgprs"], use["stack"], shared, _kinds(_AMD_TENSOR, text))


def _kinds(pattern: re.Pattern[str], text: str) -> str:
    return "+".join(sorted({" ".join(part for part in found.groups() if part) for found in pattern.finditer(text)}))


def _found(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.search(text)
    assert found is not None, f"no {pattern.pattern} in the compiler's output: another version of it?"
    return found


def _cuda_use(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _found(_CUDA_USE, text)
    return int(found.group(1)), int(found.group(2))
