"""Should a prompt be computed by one worker and decoded by another? Decided by how much of it isn't cached.

A long prefill delays the decodes of its worker; a short one, or one whose prefix is stored, isn't worth a move. So the
store is asked how far it reaches, in memory and in its tiers, and what is left is compared with `at`. The KV goes
through the store in either case: between workers of one host through its pool, without a copy; between hosts through
their stores' p2p tiers, by key. Whatever fails on the way, the worker that decodes computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.errors import ForebayError
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import decode_namespace, pack_tokens, root_key
from forebay.kvstore.protocol import Explained
from forebay.tiers.p2p.options import Address
from forebay.tiers.p2p.transfer_params import prefill_request
from forebay.workers.api.fleet import Fleet
from forebay.workers.health import ask, health_of

log = logging.getLogger(__name__)

VIEWS_MAX = 16
"""Tenants for which a connection to the store is kept."""
ANSWER_S = 0.25
"""A store that takes longer to say what it has is taken to have all of it: nothing is moved."""
RETRY_S = 1.0
LOOK_S, LOOK_PATIENCE_S, MISSES = 0.3, 0.6, 2
"""How often another host's front end is asked how it is, how long that may take, and how often in a row it may fail."""
PREFILL_S = 300.0
FORGET_S = 0.15
"""To be asked is to look: our store's p2p tier remembers for 0.1 s (its `miss_s`) what its peers were found to lack. A
prefill that was quicker is waited for so long, else the store would not find what it brought."""


class StoreView:
    """Says how far the store reaches, for one tenant at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._views: OrderedDict[str, AsyncStoreClient] = OrderedDict()
        self._failed_at: float | None = None

    @property
    def connections(self) -> int:
        """Open connections, at most VIEWS_MAX."""
        return len(self._views)

    async def reach(self, namespace: bytes, prompt: Sequence[int], salt: bytes, tenant: str) -> int | None:
        """Tokens of `prompt` that are in memory or in some tier; None if the store can't say in time."""
        loop = asyncio.get_running_loop()
        if self._failed_at is not None and loop.time() - self._failed_at < RETRY_S:
            return None
        found = decode_namespace(namespace)
        try:
            async with asyncio.timeout(ANSWER_S):
                client = await self._view(tenant)
                told = await client.explain(found.id, root_key(found.id, salt), pack_tokens(prompt))
        except (ForebayError, OSError, TimeoutError) as error:
            log.info("the store doesn't say what it has: %s", error or type(error).__name__)
            self._failed_at = loop.time()
            await self._forget(tenant)
            return None
        self._failed_at = None
        return reach_of(told)

    async def _view(self, tenant: str) -> AsyncStoreClient:
        client = self._views.get(tenant)
        if client is not None and client.connected:
            self._views.move_to_end(tenant)
            return client
        await self._forget(tenant)
        client = AsyncStoreClient(self._address, kind="frontend", tenant=tenant)
        await client.connect()
        self._views[tenant] = client
        while len(self._views) > VIEWS_MAX:
            await self._views.popitem(last=False)[1].close()
        return client

    async def _forget(self, tenant: str) -> None:
        client = self._views.pop(tenant, None)
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """End all connections."""
        while self._views:
            await self._views.popitem()[1].close()


def reach_of(told: Explained) -> int:
    """The most that memory or one tier alone has of all groups."""
    tiers: dict[str, int] = {}
    for reach in told.reaches:
        tiers[reach.tier] = min(tiers.get(reach.tier, reach.tokens), reach.tokens)
    return max(told.hit, *tiers.values(), 0)


@dataclass(eq=False)
class RemotePrefill:
    """The front end of another host that prefills for us; its store and ours are each other's peers."""

    address: Address
    up: bool = False
    running: int = 0
    _down: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self) -> None:
        """Keep asking how it is, for ever."""
        misses = MISSES
        while True:
            try:
                health = await asyncio.wait_for(health_of(self.address.host, self.address.port), LOOK_PATIENCE_S)
            except TimeoutError:
                health = None
            misses = 0 if health is not None and health.serving else misses + 1
            if (misses < MISSES) != self.up:
                self.up = not self.up
                log.info("the prefill host %s is %s", self.address, "there" if self.up else "gone")
            self._down.clear() if self.up else self._down.set()
            await asyncio.sleep(LOOK_S)

    async def prefill(self, prompt: Sequence[int], cache_salt: str | None, authorization: str | None) -> bool:
        """Let it compute a prompt; True once its store has the KV. Given up as soon as it is gone."""
        work = asyncio.ensure_future(self._ask(prompt, cache_salt, authorization))
        gone = asyncio.ensure_future(self._down.wait())
        self.running += 1
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return work.done() and work.result()
        finally:
            self.running -= 1
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _ask(self, prompt: Sequence[int], cache_salt: str | None, authorization: str | None) -> bool:
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "kv_transfer_params": prefill_request()}
        body |= {"cache_salt": cache_salt} if cache_salt else {}
        headers = {"content-type": "application/json"} | ({"authorization": authorization} if authorization else {})
        host, port = self.address.host, self.address.port
        try:
            async with asyncio.timeout(PREFILL_S):
                told = await ask(host, port, "POST", "/v1/completions", json.dumps(body).encode(), headers)
        except (OSError, ValueError, TimeoutError) as error:
            log.info("the prefill host %s failed: %s", self.address, error or type(error).__name__)
            return False
        if told.status != 200:
            log.info("the prefill host %s said %d: %s", self.address, told.status, told.body[:200])
        return told.status == 200


@dataclass
class SplitCounters:
    """What became of prompts of at least `at` tokens: too much of them was `cached`, nobody could (`alone`), or they
    were prefilled by a `local` worker or a `remote` host, which may have `failed`."""

    cached: int = 0
    alone: int = 0
    local: int = 0
    remote: int = 0
    failed: int = 0


@dataclass
class Splitter:
    """Decides for one front end. `at` is how many uncached tokens are worth a move."""

    fleet: Fleet
    store: StoreView
    at: int
    remotes: Sequence[RemotePrefill] = ()
    counters: SplitCounters = field(default_factory=SplitCounters)

    async def run(self) -> None:
        """Watch the other hosts, for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for remote in self.remotes:
                    tasks.create_task(remote.watch())
                await asyncio.Event().wait()
        finally:
            await self.store.close()

    async def local(
        self, prompt: Sequence[int], salt: bytes, tenant: str, cache_salt: str | None, authorization: str | None
    ) -> bool:
        """Is the prompt to be prefilled by one of our own prefill workers? Where another host is to do it, this returns
        after it has, or has failed to."""
        if len(prompt) < self.at or self.fleet.description is None:
            return False
        # A host that takes prompts and says nothing must not gather more of them than may be under way here.
        up = [remote for remote in self.remotes if remote.up and remote.running < self.fleet.max_calls]
        if not self.fleet.prefills and not up:
            self.counters.alone += 1
            return False
        reach = await self.store.reach(self.fleet.description.namespace, prompt, salt, tenant)
        if reach is None or len(prompt) - reach < self.at:
            self.counters.cached += 1
            return False
        if self.fleet.prefills:
            self.counters.local += 1
            return True
        asked = asyncio.get_running_loop().time()
        done = await min(up, key=lambda remote: remote.running).prefill(prompt, cache_salt, authorization)
        if done:
            await asyncio.sleep(max(0.0, asked + FORGET_S - asyncio.get_running_loop().time()))
        self.counters.remote += done
        self.counters.failed += not done
        return False
