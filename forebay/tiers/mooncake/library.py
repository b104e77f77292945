"""Mooncake's library: is it there, and told what it reads from the environment."""

from __future__ import annotations

import ctypes
import importlib
import os
from types import ModuleType

from forebay.errors import ConfigError
from forebay.tiers.mooncake.options import MooncakeOptions

IBVERBS = "libibverbs.so.1"


def load_library(name: str, options: MooncakeOptions) -> ModuleType:
    """`mooncake.store`. Raises ConfigError that names what to install.

    What an administrator has set in the environment stays as it is.
    """
    try:
        ctypes.CDLL(IBVERBS)
    except OSError as error:
        raise ConfigError(
            f"tier {name!r}: Mooncake needs {IBVERBS}, also without RDMA: apt-get install libibverbs1 ({error})"
        ) from error
    for key, value in _environment(options).items():
        os.environ.setdefault(key, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(f"tier {name!r}: can't load Mooncake: {error}; pip install 'forebay[mooncake]'") from error


def _environment(options: MooncakeOptions) -> dict[str, str]:
    rpc_ms = str(int(options.rpc_timeout_s * 1000))
    return {
        "MC_LOG_LEVEL": "ERROR",
        "MC_RPC_TIMEOUT_MS": rpc_ms,
        "MC_RPC_CONNECT_TIMEOUT_MS": rpc_ms,
        # Without this a transfer from a host that hangs takes a minute, and its bytes may arrive after that.
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(int(options.transfer_timeout_s)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    }
