"""What a tier may lack, by name. A suite declares each lack with its reason, and its tests are skipped with that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

ABILITIES = {
    "partial": "a lookup finds other children of the parent that begin with the same tokens",
    "persistent": "what was stored is there after a close and a new start; a tier without forgets all of it",
    "quota": "a byte quota of its own that is never exceeded",
    "eviction": "makes room by evicting cold chunks first, then the least recently used",
    "forget": "single chunks can be removed at once",
    "clear": "whole namespaces can be removed at once",
    "told": "says of every arrival and removal, with the chunk's header",
    "counts": "knows how many chunks and bytes it has",
    "damage": "the suite can damage what is stored (hook `damage`)",
    "stall": "the suite can hold the tier's device or server still (hook `stalled`)",
    "queue": "its store queue is bounded by the option that the suite sets to QUEUE, and drops what is over it",
    "deadline": "a load ends as late once its deadline has passed",
    "tidy": "a close leaves no thread and no descriptor",
}
"""Every name, and what a tier with that ability does."""

F = TypeVar("F", bound=Callable[..., Any])


def needs(*names: str) -> Callable[[F], F]:
    """Marks a test that says nothing about a tier without these abilities."""
    assert set(names) <= ABILITIES.keys(), names

    def mark(test: F) -> F:
        test.needs = names  # type: ignore[attr-defined]
        return test

    return mark


def check_lacks(suite: str, lacks: dict[str, str]) -> None:
    """Raises TypeError for a lack that isn't known or has no reason."""
    for name, reason in lacks.items():
        if name not in ABILITIES:
            raise TypeError(f"{suite}.lacks: {name!r} is no ability; there are {', '.join(ABILITIES)}")
        if len(reason.split()) < 3:
            raise TypeError(f"{suite}.lacks[{name!r}]: say in a sentence why this tier can't")
