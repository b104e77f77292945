"""Bytes between canonical granules and a shard's buffers: all granules, layers, K and V of a pattern in one launch.

The payload may be in device memory, in host memory that is mapped for the device (pinned or registered: the kernel
reads and writes it over the bus), or in plain host memory: then it goes through packed bytes on both sides, so that a
rank never writes what is another's.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.moving import AXES_MAX, Pattern, alignment, as_words, check_inside
from forebay.kernels.moving import move as move_on_host

BLOCK = 1024
"""Words that a program copies."""


@triton.jit
def move_kernel(
    source, target, source_at, target_at, words,
    S0, S1, S2, S3, S4, T0, T1, T2, T3, T4,
    INNER: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Words of nests [N0, N1, N2, N3, N4, INNER], whose strides in words are S in `source` and T in `target`; each
    nest's first word is at source_at[nest] and target_at[nest]. One program a nest and BLOCK of its `words`."""
    nest = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inner, rest = at % INNER, at // INNER
    i4, rest = rest % N4, rest // N4
    i3, rest = rest % N3, rest // N3
    i2, rest = rest % N2, rest // N2
    i1, i0 = rest % N1, rest // N1
    read = tl.load(source_at + nest) + i0 * S0 + i1 * S1 + i2 * S2 + i3 * S3 + i4 * S4 + inner
    written = tl.load(target_at + nest) + i0 * T0 + i1 * T1 + i2 * T2 + i3 * T3 + i4 * T4 + inner
    inside = at < words
    tl.store(target + written, tl.load(source + read, mask=inside), mask=inside)


def move(pattern: Pattern, payload: Tensor, buffers: Tensor, *, store: bool) -> None:
    """See `forebay.kernels.moving.move`; `payload` may be host memory where `buffers` isn't.

    Returns once it is queued on the current stream, if the payload can be reached from the device; else it blocks.
    """
    assert payload.dtype == buffers.dtype == torch.uint8, (payload.dtype, buffers.dtype)
    if not len(pattern.local_at):
        return
    if payload.device == buffers.device or payload.is_pinned():
        check_inside(pattern, payload, buffers)
        _launch(pattern, payload, buffers, store=store)
    else:
        move_staged(pattern, payload, buffers, store=store)


def move_staged(pattern: Pattern, payload: Tensor, buffers: Tensor, *, store: bool) -> None:
    """The same through packed bytes: a launch on the device, a plain copy over the bus, a strided one on the host."""
    check_inside(pattern, payload, buffers)
    on_device, on_host = pattern.packed()
    size = pattern.piece * len(pattern.local_at)
    packed = torch.empty(size, dtype=torch.uint8, device=buffers.device)
    if store:
        _launch(on_device, packed, buffers, store=True)
        move_on_host(on_host, payload, packed.cpu(), store=True)
    else:
        host = torch.empty(size, dtype=torch.uint8)
        move_on_host(on_host, payload, host, store=False)
        packed.copy_(host)
        _launch(on_device, packed, buffers, store=False)


def _launch(pattern: Pattern, payload: Tensor, buffers: Tensor, *, store: bool) -> None:
    word = min(pattern.word, alignment(payload), alignment(buffers))
    missing = AXES_MAX - len(pattern.times)
    times = (1,) * missing + pattern.times
    canonical = tuple(step // word for step in (0,) * missing + pattern.canonical)
    local = tuple(step // word for step in (0,) * missing + pattern.local)
    there, here = as_words(payload, word), as_words(buffers, word)
    there_at, here_at = ((at // word).to(buffers.device) for at in (pattern.canonical_at, pattern.local_at))
    words = pattern.piece // word
    sides = (here, there, here_at, there_at) if store else (there, here, there_at, here_at)
    strides = (*local, *canonical) if store else (*canonical, *local)
    grid = (len(here_at), triton.cdiv(words, BLOCK))
    move_kernel[grid](
        *sides, words, *strides, INNER=pattern.length // word, N1=times[1], N2=times[2], N3=times[3], N4=times[4],
        BLOCK=BLOCK,
    )  # fmt: skip
