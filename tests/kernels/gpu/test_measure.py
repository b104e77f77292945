"""What checks and measures kernels on a GPU works: here on small tensors of the host, with a clock that is made up."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from forebay.errors import ResourceError
from forebay.kernels.dispatch import CAPABILITIES
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.measure import bench, parity, peers, tune
from forebay.kernels.measure.parity import CHECKS, Place, Wrong
from forebay.kernels.measure.timing import Ceilings, ceilings
from forebay.kernels.measure.work import Scale, Work, works
from forebay.kernels.tuning.tables import sizes_for

HERE = Place(torch.device("cpu"), torch.float32)
TINY = Scale(sequences=1, context=32, prefill=32, kv_heads=2, experts=8, hidden=64, granules=2)


class Clock:
    """Runs what it is given once, and says the next of its times."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return next(self._seconds)


@pytest.mark.parametrize("name", CHECKS)
def test_every_operation_passes_its_check(name: str) -> None:
    CHECKS[name](HERE)


def test_every_operation_that_a_kernel_may_take_has_a_check() -> None:
    """Without one it would never be recorded as run on a device, and never be taken there."""
    assert set(CAPABILITIES) <= set(CHECKS)


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(parity.gpu_norm, "add_norm", lambda hidden, *_: hidden * 1.01)
    monkeypatch.setattr(bench, "CHECKS", {"norm": CHECKS["norm"]})
    assert bench.wrong(HERE) == ["norm"]
    assert "norm: WRONG: off by" in capsys.readouterr().err


def test_no_number_is_wrong() -> None:
    with pytest.raises(Wrong):
        parity.close(torch.tensor([float("nan")]), torch.tensor([1.0]), HERE)


def test_rates_are_told_beside_their_ceilings() -> None:
    found = works(HERE, TINY)
    decode = found[0]
    assert decode.amount == 2 * 32 * 2 * 128 * 4  # K and V of 32 tokens, two heads of 128, in fp32
    limits = Ceilings(copy=decode.amount / 1e-6, link=1e9, product=1e12)
    lines = list(bench.measured([decode], "generic", limits, Clock(1.2e-6)))
    assert "83.3% of copy; 80% met" in lines[0]
    lines = list(bench.measured([decode], "generic", limits, Clock(2e-6)))
    assert "50.0% of copy; 80% not met" in lines[0]


def small_decode() -> peers.Paged:
    (decode, *_) = works(HERE, Scale(sequences=3, context=37, prefill=32, kv_heads=2, experts=8, hidden=64, granules=2))
    assert decode.paged is not None
    return decode.paged(Tiling(16, 32))


def test_other_packages_get_the_same_keys_and_values() -> None:
    """By pages, and side by side: plain attention over either gives what ours gives."""
    paged = small_decode()
    pages, (keys, values) = peers.pages_of(paged.where), peers.side_by_side(paged)
    starts, last = pages.starts.tolist(), pages.last.tolist()
    wanted = paged.ours()
    for i in range(3):
        rows = paged.pool[pages.indices[starts[i] : starts[i + 1]].long(), 0]
        of_pages = rows.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : 16 * (len(rows) - 1) + last[i]]
        assert torch.equal(of_pages, torch.stack((keys[i], values[i])))
        k, v = (side[None].transpose(1, 2) for side in of_pages)
        found = torch.nn.functional.scaled_dot_product_attention(paged.q[i, :, None][None], k, v, enable_gqa=True)
        torch.testing.assert_close(found[0, :, 0], wanted[i], rtol=0, atol=2e-5)


def test_a_package_that_is_absent_fails_or_gives_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = small_decode()

    def fail(*_: object) -> peers.Run:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    others = {"Same": ("math", lambda *_: paged.ours), "Other": ("math", lambda *_: lambda: paged.ours() + 1.0)}
    monkeypatch.setattr(peers, "PEERS", {"FlashInfer": peers.PEERS["FlashInfer"], "Broken": ("math", fail), **others})
    found = list(peers.beside(paged, Clock(0.5)))
    assert [seconds for _, seconds, _ in found] == [None, None, 0.5, None]
    assert [why for _, _, why in found] == [
        "not installed", "RuntimeError: no kernel for this device", "off by 0", "off by 1",
    ]  # fmt: skip


def test_a_packages_rate_is_told_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = works(HERE, TINY)[0]
    monkeypatch.setattr(bench, "sizes_for", lambda *_, **__: Tiling(16, 32))
    monkeypatch.setattr(bench, "beside", lambda *_: iter([("FlashInfer", 1.6e-6, ""), ("Other", None, "off by 1")]))
    limits = Ceilings(copy=decode.amount / 1e-6, link=1e9, product=1e12)
    lines = list(bench.measured([decode], "generic", limits, Clock(2e-6)))
    assert "ours  80.0% of it" in lines[1] and "off by 1" in lines[2]


def test_all_work_runs_with_shipped_sizes() -> None:
    found = works(HERE, TINY)
    small = {"attend": Tiling(16, 32), "latent": Tiling(16, 32), "experts": Sizes(16, 64, 64)}
    for work in found:
        work.run(None if work.operation is None else small[work.operation.split(".")[0]])


def test_ceilings_count_bytes_and_operations() -> None:
    found = ceilings(torch.device("cpu"), Clock(1.0, 1.0, 1.0), size=1000, side=10)
    assert found == Ceilings(copy=2000.0, link=1000.0, product=2000.0)


def work_of(run: Callable[[object], object], **shape: int) -> Work:
    return Work("w", "attend.decode", shape, run, 1, "copy", 0.8, Tiling)


def test_the_fastest_candidate_wins_and_refusals_are_left_out() -> None:
    def run(tiling: Tiling) -> None:
        if tiling.keys == 64:
            raise MemoryError

    candidates = [Tiling(keys=keys) for keys in (16, 32, 64)]
    best = tune.fastest(work_of(run), candidates, Clock(3.0, 2.0), (MemoryError,))
    assert (best.sizes.keys, best.seconds, best.refused) == (32, 2.0, 1)
    with pytest.raises(ResourceError, match="none of 1 candidates"):
        tune.fastest(work_of(run), candidates[2:], Clock(), (MemoryError,))


def test_a_failure_that_is_no_refusal_ends_the_tuning() -> None:
    def run(_: object) -> None:
        raise RuntimeError("an illegal address")

    with pytest.raises(RuntimeError):
        tune.fastest(work_of(run), [Tiling()], Clock(), (MemoryError,))


def test_entries_ascend_and_the_last_one_has_no_limits() -> None:
    pairs = [(work_of(print, context=context), tune.Best(Tiling(keys=context), 1.0, 0)) for context in (64, 16, 32)]
    found = tune.entries(pairs, lambda work: work.shape)
    limits = [(entry.get("upto"), entry["keys"]) for entry in found]
    assert limits == [({"context": 16}, 16), ({"context": 32}, 32), (None, 64)]


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "gfx950", "generic", "a device without a table"])
def test_shipped_tables_have_sizes_for_every_shape(target: str) -> None:
    for operation in ("attend.prefill", "attend.decode", "latent.decode"):
        for context in (1, 10**7):
            sizes_for(target, operation, Tiling, dim=10**4, context=context)
    for form in ("plain", "fp8", "mxfp4"):
        for each in (1, 10**6):
            assert sizes_for(target, f"experts.{form}", Sizes, each=each).rows >= 16
