"""The figures of docs/hardware.md."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.scheduler.fleet import Rates

BLOCK = 512
"""Tokens of a trace's block."""


@dataclass(frozen=True)
class Hardware:
    """One kind of cluster. Rates in tokens or bytes a second, times in seconds, sizes in bytes."""

    name: str
    kv_bytes: int
    prefill: float
    attention_tokens: float
    device_tokens: int
    decode_s: float
    device_link: float
    workers_a_host: int
    memory: float = 1e12
    disk: float = 8e12
    disk_read: float = 48e9
    network: float = 45e9
    latency_s: float = 0.002
    visible_s: float = 0.02
    decode_slows: float = 0.004
    noise: float = 0.1

    def blocks(self, size: float) -> int:
        """How many of a trace's blocks so many bytes hold."""
        return int(size / self.kv_bytes / BLOCK)

    @property
    def rates(self) -> Rates:
        """What the router is told of each worker."""
        host, disk, move = (self.kv_bytes / rate for rate in (self.device_link, self.disk_read, self.network))
        return Rates(
            prefill_s=1 / self.prefill, attention_tokens=self.attention_tokens,
            load_s=(0.0, host, max(host, disk), max(host, move)), move_s=max(host, move), latency_s=self.latency_s,
            decode_slows=self.decode_slows,
        )  # fmt: skip

    def prefill_s(self, begin: float, end: float) -> float:
        """What a device takes for the tokens [begin, end)."""
        return ((end - begin) + (end * end - begin * begin) / (2 * self.attention_tokens)) / self.prefill


HARDWARE = {
    made.name: made
    for made in (
        Hardware("h100", 131_072, 27_000, 30_000, 400_000, 0.012, 50e9, 8),
        Hardware("h100-70b", 327_680, 11_000, 53_000, 400_000, 0.025, 200e9, 2),
    )
}
