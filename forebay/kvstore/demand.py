"""What tenants ask for and get: tokens by account, and curves of what more or less memory would do. Pure."""

from __future__ import annotations

from forebay.kvstore.core import StoreCore
from forebay.kvstore.curves import Curves
from forebay.kvstore.entry import Entry
from forebay.kvstore.identity import KEY_BYTES, Namespace
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.slots import slot_bytes_for

FADE_S = 2 * 3600.0
"""The past counts half after this long."""


class Demand:
    """Fed by the service, off the path of a lookup's answer. `now` is the store's clock, in seconds."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._chunk_bytes: dict[bytes, int] = {}
        self._faded: float | None = None
        self.curves = Curves()

    def looked_up(self, tenant: str, prompt: Prompt, hit: int) -> None:
        """A lookup was answered. Only whole chunks are in the curves: a tail has another key each turn."""
        asked = prompt.longest
        account = self._core.place.accounts.of(tenant)
        account.counts.asked_tokens += asked
        account.counts.hit_tokens += hit
        whole = asked // prompt.namespace.chunk_tokens
        size = self._bytes_of_a_chunk(prompt.namespace_id, prompt.namespace)
        self.curves.looked_up(tenant, prompt.keys[: whole * KEY_BYTES], size, asked, hit)

    def stored(self, entry: Entry) -> None:
        """A chunk was committed. Chunks of one position in several groups count as one, by the first group's."""
        namespace = self._core.namespaces[entry.namespace]
        if entry.group == 0 and entry.token_count == namespace.chunk_tokens:
            self.curves.stored(entry.tenant, entry.key, self._bytes_of_a_chunk(entry.namespace, namespace))

    def _bytes_of_a_chunk(self, namespace_id: bytes, namespace: Namespace) -> int:
        """Bytes that one chunk position takes in all groups."""
        known = self._chunk_bytes.get(namespace_id)
        if known is None:
            if len(self._chunk_bytes) >= self._core.limits.namespaces:
                self._chunk_bytes.clear()
            length = namespace.chunk_tokens
            known = sum(slot_bytes_for(group, length, length) for group in namespace.groups)
            self._chunk_bytes[namespace_id] = known
        return known

    def fade(self, now: float) -> None:
        """Let the past fade if it is time to."""
        if self._faded is None:
            self._faded = now
        elif now - self._faded >= FADE_S:
            self._faded = now
            self.curves.fade()
