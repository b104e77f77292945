"""Output that a grammar guides: which tokens may come next, by the llguidance library.

A grammar's state follows from the ids of the output, so it is rebuilt from them wherever a request goes on. The
library holds the interpreter's lock while it prepares a vocabulary (seconds for 262,144 tokens), so that is done
before a worker serves; grammars are compiled on a thread of their own (milliseconds, without the lock).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ConfigError

GRAMMAR_CHARACTERS_MAX = 1 << 16
COMPILING_MAX = 256
"""Grammars that may wait to be compiled; the next request is answered `busy`."""

log = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """What guiding needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to an answer; nothing if it is special."""

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text."""


class Guide:
    """The state of one request's grammar. Not to be shared between threads."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    @property
    def complete(self) -> bool:
        """Nothing may come any more but the end."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Why the grammar can't go on, such as its own complexity; empty if it can."""
        return str(self._matcher.get_error())

    def mask(self, row: NDArray[Any]) -> None:
        """Set the logits of tokens that can't come next to -inf, in place. One that failed masks nothing."""
        if self.error:
            return
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        allowed = np.unpackbits(self._bits.view(np.uint8), count=len(row), bitorder="little").view(bool)
        row[~allowed] = -np.inf

    def accept(self, token: int) -> None:
        """One more output token."""
        self._matcher.consume_token(token)


class Guides:
    """Makes guides for one vocabulary. Building it takes seconds for a large one; `guide` may be called from any
    thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]) -> None:
        library = load_library()
        if not eos_ids:
            raise ConfigError("structured_outputs needs a model with an end-of-sequence token; this one names none")
        self._library = library
        self._vocab_size = vocab_size
        self._tokenizer = library.LLTokenizer(
            _Wrapped(vocabulary, vocab_size, eos_ids[0]), n_vocab=vocab_size, eos_token=list(eos_ids), slices=[]
        )

    def guide(self, grammar: str, emitted: Sequence[int] = ()) -> Guide | str:
        """A guide that has seen `emitted`, or what is wrong, in words for the client."""
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error() and emitted:
            matcher.consume_tokens(list(emitted))
        if matcher.is_error():
            return f"the grammar can't be used: {matcher.get_error()}"
        return Guide(matcher, self._vocab_size)


class _Wrapped:
    """A vocabulary as the library takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, add_bos=False)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request's grammar is ready (`guide`), or can't be used (`error`)."""

    request: Hashable
    guide: Guide | None
    error: str = ""


class Compiler:
    """Compiles grammars one after the other, on a thread of its own. `deliver` is called from that thread, once for
    every grammar that was taken, and must be quick."""

    def __init__(self, guides: Guides, deliver: Callable[[Compiled], None]) -> None:
        self._guides = guides
        self._deliver = deliver
        self._work: queue.Queue[tuple[Hashable, str, Sequence[int]]] = queue.Queue(COMPILING_MAX)
        threading.Thread(target=self._run, name="grammar", daemon=True).start()

    def __len__(self) -> int:
        return self._work.qsize()

    def offer(self, request: Hashable, grammar: str, emitted: Sequence[int]) -> bool:
        """Compile, some time; False if too many wait already."""
        try:
            self._work.put_nowait((request, grammar, emitted))
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while True:
            request, grammar, emitted = self._work.get()
            try:
                made = self._guides.guide(grammar, emitted)
            except Exception as error:  # the library's own failure must not end the thread, nor go unheard
                log.exception("compiling a grammar failed")
                made = f"the grammar can't be used: {error}"
            if isinstance(made, str):
                self._deliver(Compiled(request, None, made))
            else:
                self._deliver(Compiled(request, made))


def load_library() -> Any:
    """The llguidance module. Raises ConfigError that names the extra."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("structured outputs need llguidance; pip install 'forebay[guided]'") from error
    return llguidance
