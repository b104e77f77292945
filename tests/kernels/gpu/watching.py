"""Watches what interpreted kernels touch: the interpreter runs programs one after the other, so a race can't be seen in
its results, and reads any address that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.runtime import interpreter


@dataclass
class Watch:
    """What is wrong with the launches so far, and how many there were."""

    wrong: list[str] = field(default_factory=list)
    launches: int = 0


@dataclass
class _Launch:
    """Where its arguments lie, and what its programs have read and written: (addresses, program) each."""

    name: str
    starts: np.ndarray
    ends: np.ndarray
    read: list[tuple[np.ndarray, int]] = field(default_factory=list)
    written: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def outside(self, addresses: np.ndarray, width: int) -> int:
        """How many don't lie inside of one of the arguments."""
        at = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (at >= 0) & (addresses + width <= self.ends[at])
        return int((~inside).sum())

    def races(self) -> Iterator[str]:
        """Two programs that write the same place, or one that reads what another writes."""
        if not self.written:
            return
        addresses, programs = _together(self.written)
        order = np.argsort(addresses, kind="stable")
        addresses, programs = addresses[order], programs[order]
        same = addresses[1:] == addresses[:-1]
        if (programs[1:] != programs[:-1])[same].any():
            yield f"{self.name}: two programs write the same place"
        read, readers = _together(self.read)
        at = np.searchsorted(addresses, read).clip(max=len(addresses) - 1)
        if ((addresses[at] == read) & (programs[at] != readers)).any():
            yield f"{self.name}: a program reads what another one writes"


def _together(parts: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    none = np.empty(0, dtype=np.uint64)
    addresses = np.concatenate([none, *(part for part, _ in parts)])
    programs = np.concatenate([none, *(np.full(len(part), program, dtype=np.uint64) for part, program in parts)])
    return addresses, programs


@contextmanager
def watched() -> Iterator[Watch]:
    """Inside, all launches are watched."""
    watch, present = Watch(), [None]
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    init = executor._init_args_hst

    def begin(self: Any, args: Any, kwargs: Any) -> Any:
        found = init(self, args, kwargs)
        sides = [side for side in (*found[0], *found[1].values()) if hasattr(side, "data_ptr")]
        ranges = sorted((side.data_ptr(), side.data_ptr() + _reach(side)) for side in sides)
        starts, ends = (np.array(column, dtype=np.uint64) for column in zip(*ranges, strict=True))
        present[0] = _Launch(self.fn.__name__, starts, ends)
        return found

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        watch.launches += 1
        watch.wrong.extend(present[0].races())

    def note(kind: str, ptrs: Any, mask: Any) -> None:
        data, kept = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = data[kept.astype(bool)].astype(np.uint64).ravel()
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        x, y, z = builder.grid_idx
        _, ny, nz = builder.grid_dim
        getattr(present[0], kind).append((addresses, (x * ny + y) * nz + z))
        if outside := present[0].outside(addresses, width):
            watch.wrong.append(f"{present[0].name}: {outside} places outside of its arguments are {kind}")

    def watched_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        note("read", ptrs, mask)
        return load(ptrs, mask, *rest)

    def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("written", ptrs, mask)
        if not watch.wrong:  # what lies outside may be anybody's
            return store(ptrs, value, mask, *rest)
        return None

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    executor.__call__, executor._init_args_hst = run, begin
    try:
        yield watch
    finally:
        del builder.create_masked_load, builder.create_masked_store
        executor.__call__, executor._init_args_hst = call, init


def _reach(side: Any) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    if not side.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(side.shape, side.stride(), strict=True))
    return (last + 1) * side.element_size()
