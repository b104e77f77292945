"""Triton, or the reason why it can't be had; and how its kernels are run here."""

from __future__ import annotations

import os
from importlib.util import find_spec

from forebay.errors import ConfigError


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
