"""A worker's figures, and so `/metrics`, say which form of each operation runs."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from forebay.kernels.attention import paged_attention
from forebay.kernels.dispatch import CAPABILITIES, configure
from forebay.workers.api.fleet import Fleet
from forebay.workers.api.metrics import _Live
from forebay.workers.protocol import WorkerStats
from tests.kernels.test_attention import make_case
from tests.workers.fake_model import FakeModel
from tests.workers.harness import Harness


def test_a_workers_figures_tell_configured_eligible_and_executed() -> None:
    configure("auto")
    case = make_case([(1, 3)])
    paged_attention(case.q, case.pool, 0, case.batch, "g", scale=1.0)
    values = Harness(FakeModel(), None).parts.stats()
    assert values["kernels.attend.torch.executed"] == 1
    registry = CollectorRegistry()
    fleet = Fleet([Path("w.sock")], 1, 1.0)
    registry.register(_Live(fleet, {"w": WorkerStats(values=values, store="connected")}, None))
    text = generate_latest(registry).decode()
    for operation in CAPABILITIES:
        for name in ("triton_configured", "triton_eligible", "triton_executed", "torch_executed"):
            assert f"\nforebay_worker_kernels_{operation}_{name} " in text
