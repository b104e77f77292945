"""Triton, or the reason why it can't be had; and how its kernels are run here."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from forebay.errors import ConfigError, ResourceError


def installed() -> bool:
    """Is there a Triton to import?"""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Do kernels run as Python, on tensors of the host? Slow: for tests. It has to be so when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require() -> None:
    """Raises ConfigError if Triton isn't installed."""
    if not installed():
        raise ConfigError("the Triton kernels need the package triton: pip install 'forebay[triton]'")


def require_compiler() -> None:
    """Raises ConfigError if Triton isn't installed, or interprets instead of compiling."""
    require()
    if interpreted():
        raise ConfigError("TRITON_INTERPRET=1 makes Triton run kernels as Python: unset it to compile them")


def require_gpu(what: str) -> None:
    """Raises ConfigError as above, ResourceError if there is no GPU for `what`."""
    require_compiler()
    if not torch.cuda.is_available():
        raise ResourceError(
            f"{what} measures kernels on a GPU, and torch {torch.__version__} finds none on this machine: run it where "
            "one is, with a torch that is built for it. `compile` needs none"
        )


def architecture(device: torch.device) -> str:
    """What the device's instruction set is called: sm_90, gfx942, cpu."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "")  # AMD's, with its features behind colons
    return str(name).split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
