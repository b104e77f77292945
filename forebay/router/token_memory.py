"""What texts came to: tokens and prefix keys, so that nothing is done twice, and of what grew only its end.

A text is known by its bytes; one that goes on from a known one is found by hashes of its pages. Of the new text only
the end has to be tokenised, once without and once with what came:

    whole     T T T T T T T T T T T T            the known text
    old end                 U U U U U            its end by itself
    new end                 U U U U U S S S      that end, gone on

`whole` and `old end` end at one place of the text, `old end` and `new end` begin at one. A run of tokens that
`old end` shares with both stands at the same place in all three, so the new text is `whole` up to the run and
`new end` from there on. For byte pair encoding this is exact: a text whose encoding has a boundary at some place is
encoded as its two parts would be, and what lies behind a run that came out alike didn't reach before it. `SURE` tokens
keep away from what pre-tokenizers look at. Where there is no such run, the whole is tokenised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from forebay.scheduler.key_table import Keys
from forebay.scheduler.prefix_keys import Tokens
from forebay.scheduler.routing import KeysName, KnownKeys

REMEMBERED_TOKENS_MAX = 1 << 22
TEXTS_A_PAGE_MAX = 8
PAGE_BYTES = 1 << 10
SURE = 24


@dataclass(eq=False, slots=True)
class Remembered:
    """One text: its tokens and prefix keys. `begun` are keys of the whole blocks at its beginning, from the text that
    it grew out of; prompts fill `keys`."""

    size: int
    page: bytes
    tokens: Tokens
    begun: Mapping[KeysName, Keys] = field(default_factory=dict)
    keys: KnownKeys = field(default_factory=dict)

    def first(self, tokens: int) -> KnownKeys:
        """The keys that are known of so many of its first tokens."""
        return {name: keys[: tokens // name[0]] for name, keys in self.keys.items()}


class TokenMemory:
    """`most` tokens in all, the least recently used texts go first. Of those that end in one page `TEXTS_A_PAGE_MAX`
    are kept; each is in the table of pages once."""

    def __init__(self, most: int = REMEMBERED_TOKENS_MAX) -> None:
        self.most, self.tokens = most, 0
        self.hits = self.misses = self.grown = 0
        self._known: OrderedDict[bytes, Remembered] = OrderedDict()
        self._pages: dict[bytes, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, text: bytes) -> Remembered | None:
        """What exactly this text came to."""
        name = _name(text)
        found = self._known.get(name)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._known.move_to_end(name)
        return found

    def longest(self, text: bytes) -> Remembered | None:
        """The longest known text that this one goes on from; a page or more."""
        marks = _page_names(text)
        for page in reversed(marks):
            fitting = [self._known[name] for name in self._pages.get(page, ()) if self._begins(name, text)]
            if fitting:
                return max(fitting, key=lambda one: one.size)
        return None

    def _begins(self, name: bytes, text: bytes) -> bool:
        size = self._known[name].size
        return size < len(text) and _name(text[:size]) == name

    def put(self, text: bytes, tokens: Tokens, before: Remembered | None = None) -> Remembered:
        """Remember a text (one that is longer than the memory isn't kept). `before` is what it goes on from: keys of
        the tokens that both begin with are taken over."""
        begun = {} if before is None else before.first(leading(before.tokens, tokens))
        pages = _page_names(text)
        made = Remembered(len(text), pages[-1] if pages else b"", tokens, begun)
        name = _name(text)
        if tokens.size > self.most or name in self._known:
            return made
        self._known[name] = made
        self.tokens += tokens.size
        if made.page:
            here = self._pages.setdefault(made.page, [])
            here.append(name)
            if len(here) > TEXTS_A_PAGE_MAX:
                self._forget(here[0])
        while self.tokens > self.most:
            self._forget(next(iter(self._known)))
        return made

    def _forget(self, name: bytes) -> None:
        gone = self._known.pop(name)
        self.tokens -= gone.tokens.size
        if gone.page:
            here = self._pages[gone.page]
            here.remove(name)
            if not here:
                del self._pages[gone.page]


def stitched(whole: Tokens, old_end: Tokens, new_end: Tokens, sure: int = SURE) -> Tokens | None:
    """Tokens of a text that grew (see the module); None if the three don't tell."""
    begins = leading(old_end, new_end)
    ends = leading(whole[::-1], old_end[::-1])
    at = old_end.size - ends
    if begins - at < sure:
        return None
    return np.concatenate([whole[: whole.size - ends], new_end[at:]])


def leading(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    most = min(one.size, other.size)
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if differ.size else most


def _name(text: bytes) -> bytes:
    return xxhash.xxh3_128_digest(text)


def _page_names(text: bytes) -> list[bytes]:
    """Of all its whole pages, from the first one on: a name each for the text up to there."""
    hashed, names = xxhash.xxh3_128(), []
    for at in range(0, len(text) - PAGE_BYTES + 1, PAGE_BYTES):
        hashed.update(text[at : at + PAGE_BYTES])
        names.append(hashed.digest())
    return names
