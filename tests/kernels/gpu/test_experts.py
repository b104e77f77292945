"""The experts' products, interpreted: every format of weights, holes, biases, the whole mixture."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import experts, formats, moe
from forebay.kernels.experts import Activation, Stack
from forebay.kernels.formats import Scaled, as_fnuz, quantise_rows, unscale_fp8
from forebay.kernels.gpu import experts as gpu
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.gpu.route import sort_choices
from forebay.kernels.moe import Routing

SIZES = Sizes(rows=16, columns=32, depth=32)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(*shape: int, high: int = 256, low: int = 0, seed: int = 0) -> torch.Tensor:
    found = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
    return found.to(torch.uint8)


def stack_of(form: str, count: int, n: int, k: int, *, bias: bool = False) -> Stack:
    added = noise(count, n, seed=8) if bias else None
    if form == "plain":
        return Stack(noise(count, n, k), "plain", None, added)
    if form == "fp8":
        values = noise(count, n, k).to(torch.float8_e4m3fn)
        return Stack(values, "fp8", noise(count, *formats.scale_shape((n, k), (128, 128)), seed=3).abs() + 0.1, added)
    return Stack(bits(count, n, k // 2), "mxfp4", bits(count, n, k // 32, low=118, high=130, seed=3), added)


def assert_products(
    x: torch.Tensor | Scaled, stack: Stack, chosen: torch.Tensor, weights: torch.Tensor | None = None
) -> None:
    plain = x if isinstance(x, torch.Tensor) else unscale_fp8(x.values, x.scales, (1, 128))
    wanted = experts.expert_products(plain.double(), stack, chosen, weights)
    order = sort_choices(chosen, stack.values.shape[0], SIZES.rows)
    found = gpu.expert_products(x, stack, chosen, order, SIZES, dtype=torch.float32, weights=weights)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))


CHOSEN = torch.tensor([[2, 0], [2, 2], [-1, 0], [3, -1], [2, 3]])


@pytest.mark.parametrize("form", ["plain", "fp8", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (140, 160)])
def test_every_format_with_holes_and_an_expert_without_tokens(form: str, n: int, k: int) -> None:
    assert_products(noise(5, k, seed=1), stack_of(form, 4, n, k), CHOSEN)


@pytest.mark.parametrize("form", ["plain", "mxfp4"])
def test_biases_and_weights(form: str) -> None:
    stack = stack_of(form, 4, 48, 64, bias=True)
    assert_products(noise(5, 64, seed=1), stack, CHOSEN, noise(5, 2, seed=2))
    assert_products(noise(10, 64, seed=1), stack, CHOSEN, noise(5, 2, seed=2))


def test_fp8_on_both_sides_is_scaled_block_by_block() -> None:
    """Rows whose blocks of 128 differ by orders of magnitude."""
    x = noise(5, 300, seed=1)
    x[:, 128:256] *= 1000
    x[1, 256:] = 0
    assert_products(quantise_rows(x), stack_of("fp8", 4, 140, 300), CHOSEN)


def test_all_codes_and_the_outermost_scales_of_mxfp4() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 1)
    scales = torch.tensor([[0], [250]], dtype=torch.uint8)
    stack = Stack(codes[None], "mxfp4", scales[None])
    x, chosen = torch.eye(32), torch.zeros(32, 1, dtype=torch.int64)
    order = sort_choices(chosen, 1, SIZES.rows)
    found = gpu.expert_products(x, stack, chosen, order, SIZES, dtype=torch.float32)
    assert torch.equal(found.T, stack.plain(0))


def test_a_scale_that_is_no_number_gives_none() -> None:
    stack = Stack(bits(1, 2, 16), "mxfp4", torch.tensor([[[255], [127]]], dtype=torch.uint8))
    chosen = torch.zeros(1, 1, dtype=torch.int64)
    order = sort_choices(chosen, 1, SIZES.rows)
    found = gpu.expert_products(torch.ones(1, 32), stack, chosen, order, SIZES, dtype=torch.float32)
    assert found.isnan().tolist() == [[True, False]]


def test_fnuz_holds_the_same_numbers() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    kept = ~values.float().isnan()
    turned, scales = as_fnuz(values[kept], torch.ones(1))
    assert torch.equal(turned.float() * scales, values[kept].float())
    assert bool(values.float().isnan().sum() == 2)


@pytest.mark.parametrize("kind", ["swiglu", "clamped", "situ", "geglu"])
def test_activations(kind: str) -> None:
    gate_up, act = noise(3, 26) * 8, Activation(kind)
    torch.testing.assert_close(gpu.activate(gate_up, act), act(gate_up.double()).float(), rtol=1e-5, atol=1e-5)


def test_a_sum_is_taken_in_the_order_of_the_choices() -> None:
    """1 + 2^24 - 2^24 depends on the order."""
    given = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]])
    assert gpu.sum_choices(given, 3, torch.float32).item() == 0.0
    assert gpu.sum_choices(given[[1, 2, 0]].contiguous(), 3, torch.float32).item() == 1.0


@pytest.mark.parametrize("form", ["plain", "fp8", "mxfp4"])
def test_a_whole_mixture_with_a_shared_expert_as_a_slot(form: str) -> None:
    """The slot gives what the shared expert by itself gives beside the routed ones."""
    count, hidden, ffn, act = 4, 64, 32, Activation()
    up, down = stack_of(form, count + 1, 2 * ffn, hidden), stack_of(form, count + 1, hidden, ffn)
    x = noise(5, hidden, seed=1) * 0.1
    routed = moe.route(noise(5, count, seed=2), Routing(2, renormalise=True))
    found = gpu.mix(x, experts.with_shared(routed, count, 1), up, down, act, SIZES)
    shared = act(x.double() @ up.plain(count).double().T) @ down.plain(count).double().T
    wanted = experts.mix(x.double(), routed, up, down, act).double() + shared
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


def test_no_tokens_are_answered() -> None:
    stack = stack_of("plain", 4, 48, 64)
    chosen = torch.empty(0, 2, dtype=torch.int64)
    order = sort_choices(chosen, 4, SIZES.rows)
    found = gpu.expert_products(noise(0, 64), stack, chosen, order, SIZES, dtype=torch.float32)
    assert found.shape == (0, 48)


def test_mxfp8_rows_come_back_within_a_sixteenth() -> None:
    """Three bits of mantissa, and a largest value that the scale may cut."""
    x = noise(5, 96, seed=1) * torch.logspace(-3, 3, 5)[:, None]
    x[2, 32:64] = 0
    found = formats.unscale_mx(formats.quantise_mx(x))
    highest = x.unflatten(1, (-1, 32)).abs().amax(dim=-1).repeat_interleave(32, dim=1)
    assert bool(((found - x).abs() <= x.abs() / 8 + highest * 2**-16).all())
    assert not found[2, 32:64].any()
