"""Objects by NIXL's OBJ engine: get and put of bytes whose length is known, beside boto3, which does the rest.

NIXL says of a failure only that there was one, has no timeout, and can't be called off. So bytes go through memory of
this module's own; what is given up keeps its memory until NIXL is through with it, and boto3 is asked instead, which
tells what is wrong.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError
from forebay.tiers.s3.options import S3Options

log = logging.getLogger("forebay.tier.s3")

MODULES = ("nixl_cu12._api", "nixl._api")
POLL_FIRST_S, POLL_MAX_S = 0.0002, 0.005
STUCK_BYTES_MAX = 64 << 20
"""Memory of transfers that were given up and go on. With more, everything goes by boto3."""


@dataclass(slots=True)
class _Transfer:
    """One request under way, with what has to live as long as it does."""

    handle: Any
    memory: bytearray
    registered: tuple[Any, Any]


class NixlObjects:
    """Used from any thread; the agent is asked under a lock, and waited for without it. Raises ConfigError without the
    package, and what NIXL raises if it has no OBJ engine here.

    Credentials are those of the AWS chain as the engine's own library takes it (environment, shared files,
    container, instance): none are passed on.
    """

    def __init__(self, options: S3Options, clock: Callable[[], float] = time.monotonic, api: Any = None) -> None:
        api = api or _api()
        self._bucket, self._clock = options.bucket, clock
        self._lock = threading.Lock()
        self._serial = 0
        self._stuck: list[_Transfer] = []
        self.counts: Counter[str] = Counter()
        self._agent = api.nixl_agent("objects", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("OBJ", _parameters(options))

    def get(self, name: str, offset: int, length: int, until: float) -> bytearray | None:
        """That part of an object, nothing of it verified; None if it didn't come, or not by `until`. Blocks.

        An object that ends too early leaves zeros.
        """
        memory = bytearray(length)
        return memory if self._run("READ", name, offset, memory, until) == "DONE" else None

    def put(self, name: str, body: bytes, until: float) -> bool | None:
        """Store an object; False if it wasn't, None if that isn't known by `until`. Blocks."""
        state = self._run("WRITE", name, 0, bytearray(body), until)
        return None if state == "PROC" else state == "DONE"

    def _run(self, operation: str, name: str, offset: int, memory: bytearray, until: float) -> str:
        with self._lock:
            if not memory or self._sweep() > STUCK_BYTES_MAX:
                self.counts["nixl_passed_over"] += 1
                return "ERR"
            try:
                transfer, state = self._begin(operation, name, offset, memory)
            except Exception as error:
                return self._failed(operation, error)
        pause = POLL_FIRST_S
        while state == "PROC" and self._clock() < until:
            time.sleep(pause)
            pause = min(2 * pause, POLL_MAX_S)
            with self._lock:
                state = self._state(operation, transfer)
        with self._lock:
            if state == "PROC":
                self.counts["nixl_given_up"] += 1
                self._stuck.append(transfer)
            else:
                self._release(transfer)
        self.counts[f"nixl_{operation.lower()}s"] += state == "DONE"
        return state

    def _begin(self, operation: str, name: str, offset: int, memory: bytearray) -> tuple[_Transfer, str]:
        self._serial += 1
        address, length = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        ours = self._agent.register_memory([(address, length, 0, "")], "DRAM")
        theirs = self._agent.register_memory([(0, offset + length, self._serial, name)], "OBJ")
        local = self._agent.get_xfer_descs([(address, length, 0)], "DRAM")
        remote = self._agent.get_xfer_descs([(offset, length, self._serial)], "OBJ")
        handle = self._agent.initialize_xfer(operation, local, remote, "objects")
        transfer = _Transfer(handle, memory, (ours, theirs))
        return transfer, str(self._agent.transfer(handle))

    def _state(self, operation: str, transfer: _Transfer) -> str:
        try:
            return str(self._agent.check_xfer_state(transfer.handle))
        except Exception as error:  # the library's, one for each way to fail
            return self._failed(operation, error)

    def _failed(self, operation: str, error: Exception) -> str:
        self.counts["nixl_failures"] += 1
        log.debug("s3: NIXL failed to %s an object: %s", operation.lower(), type(error).__name__)
        return "ERR"

    def _release(self, transfer: _Transfer) -> None:
        try:
            self._agent.release_xfer_handle(transfer.handle)
            for registered in transfer.registered:
                self._agent.deregister_memory(registered)
        except Exception as error:
            log.debug("s3: NIXL can't release a transfer: %s", type(error).__name__)

    def _sweep(self) -> int:
        """Let go of given up transfers that have ended; bytes of those that haven't."""
        going = []
        for transfer in self._stuck:
            if self._state("finish", transfer) == "PROC":
                going.append(transfer)
            else:
                self._release(transfer)
        self._stuck = going
        return sum(len(transfer.memory) for transfer in going)

    def figures(self) -> dict[str, float]:
        """Gauges and counters."""
        with self._lock:
            stuck = sum(len(transfer.memory) for transfer in self._stuck)
        return {"nixl_stuck_bytes": float(stuck)} | {name: float(count) for name, count in self.counts.copy().items()}


def _api() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError('engine = "nixl" takes NIXL: pip install forebay[p2p]')


def _parameters(options: S3Options) -> dict[str, str]:
    parameters = {
        "bucket": options.bucket, "region": options.region or "us-east-1",
        "use_virtual_addressing": "false" if options.addressing == "path" else "true",
        "num_threads": str(options.read_threads + options.write_threads),
        # Trailing checksums are what many services can't take.
        "req_checksum": "required",
    }  # fmt: skip
    if options.endpoint_url is not None:
        scheme, _, _ = options.endpoint_url.partition("://")
        parameters |= {"endpoint_override": options.endpoint_url, "scheme": scheme}
        if options.addressing == "auto":
            parameters["use_virtual_addressing"] = "false"
    if options.ca_bundle is not None:
        parameters["ca_bundle"] = options.ca_bundle
    return parameters
