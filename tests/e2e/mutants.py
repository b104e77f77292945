"""Mistakes that a mixed load must notice: `python -m tests.e2e.mutants NAME COMMAND ...` is `forebay COMMAND ...`.

    repeats    a front end forgets the last token it emitted when a worker is lost: the client reads it twice
    forgets    a front end doesn't offer a lost worker's requests to any other: their clients wait for ever
    reseeds    later attempts draw other random numbers
    swaps      what comes from the store is put into its blocks in another order
    leaks      a worker keeps the blocks of requests that were cancelled
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec


def repeats() -> None:
    from forebay.workers.api.fleet import Fleet

    lost = Fleet._lost_worker

    def forgetful(self: Any, call: Any) -> None:
        if len(call.emitted):
            call.emitted.pop()
        lost(self, call)

    Fleet._lost_worker = forgetful  # type: ignore[method-assign]


def forgets() -> None:
    from forebay.workers.api.fleet import Fleet

    offer = Fleet._offer

    def forgetful(self: Any, call: Any) -> None:
        if not call.deaths:
            offer(self, call)

    Fleet._offer = forgetful  # type: ignore[method-assign]


def reseeds() -> None:
    from forebay.workers.api.calls import Call

    request = Call.request

    def reseeded(self: Any, **more: Any) -> Any:
        asked = request(self, **more)
        seed = asked.sampling.seed + asked.attempt - 1
        return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, seed=seed))

    Call.request = reseeded  # type: ignore[method-assign]


def swaps() -> None:
    from forebay.workers.holdings import Holdings

    adopt = Holdings._adopt

    def swapped(self: Any, holding: Any, group: int, *more: Any) -> None:
        adopt(self, holding, group, *more)
        table = holding.tables[group]
        if len(table) > 1:
            table[-1], table[-2] = table[-2], table[-1]

    Holdings._adopt = swapped  # type: ignore[method-assign]


def leaks() -> None:
    from forebay.workers.engine import Engine

    forget = Engine._cancel

    def leaking(self: Any, key: Any, **more: Any) -> None:
        memory = self._parts.memory
        release, memory.release = memory.release, lambda request: None
        try:
            forget(self, key, **more)
        finally:
            memory.release = release

    Engine._cancel = leaking  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {made.__name__: made for made in (repeats, forgets, reseeds, swaps, leaks)}


if __name__ == "__main__":
    from forebay.parent import follow_parent

    follow_parent()
    from forebay.cli.main import main

    name, *arguments = sys.argv[1:]
    MUTANTS[name]()
    sys.exit(main(arguments))
