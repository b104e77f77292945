"""The backends as the router sees them now: up, draining, broken; and what they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.router.breaker import Breaker
from forebay.router.client import BackendFailed, ask
from forebay.router.settings import Backend, RouterConfig, own_headers

log = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Unusable(BackendFailed):
    """It answers, but not what is needed: worth a word in the log, unlike one that is down."""


@dataclass(eq=False)
class Upstream:
    """One backend. `trouble` is why it isn't used, `prefilling` how many prompts it computes for others."""

    backend: Backend
    breaker: Breaker
    up: bool = False
    draining: bool = False
    ours: bool = False
    models: dict[str, str | None] = field(default_factory=dict)
    max_context: int = 0
    trouble: str = ""
    prefilling: int = 0

    def move(self, backend: Backend) -> None:
        """It is somewhere else now: nothing of before holds."""
        self.mark(False)
        self.backend, self.models, self.ours, self.max_context, self.trouble = backend, {}, False, 0, ""
        self.breaker = Breaker(self.breaker.failures, self.breaker.rest_s)

    def mark(self, up: bool) -> None:
        """It is up, or isn't."""
        if up != self.up:
            log.info("worker %s is %s", self.backend.name, "up" if up else "down")
        self.up = up


class Upstreams:
    """All of them. `watch` polls their health until it is cancelled; `on_down` hears of one that is down, each time."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float], on_down: Callable[[int], None]) -> None:
        self._config, self._clock, self._on_down = config, clock, on_down
        self._own = own_headers(config)
        self.all = [Upstream(b, Breaker(config.breaker_failures, config.breaker_s)) for b in config.backends]

    def open(self, model: str | None, without: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
        """Which may get a new request for this model (None: any): those that decode, if there are any."""
        able = np.array([number not in without and self._able(up, model) for number, up in enumerate(self.all)])
        decode = able & ~np.array([up.backend.prefill for up in self.all])
        return decode if decode.any() else able

    def prefills(self, model: str | None) -> list[int]:
        """Which may compute a prompt for others."""
        return [number for number, up in enumerate(self.all) if up.backend.prefill and self._able(up, model)]

    def _able(self, up: Upstream, model: str | None) -> bool:
        known = model is None or model in up.models
        return up.up and not up.draining and up.breaker.allows(self._clock()) and known

    def models(self) -> dict[str, int]:
        """Models that somebody serves, with the shortest context of those that do."""
        found: dict[str, int] = {}
        for upstream in self.all:
            for name in upstream.models if upstream.up else ():
                found[name] = min(found.get(name, upstream.max_context), upstream.max_context)
        return found

    async def watch(self) -> None:
        """Poll for ever."""
        while True:
            every = range(len(self.all))
            looks = await asyncio.gather(*(self._look(number) for number in every), return_exceptions=True)
            for upstream, failed in zip(self.all, looks, strict=True):
                if isinstance(failed, Exception):  # a bug; the others are looked at all the same
                    upstream.mark(False)
                    log.error("worker %s can't be looked at", upstream.backend.name, exc_info=failed)
            await asyncio.sleep(self._config.health_s)

    async def _look(self, number: int) -> None:
        upstream = self.all[number]
        before = upstream.up
        try:
            status, _ = await self.get(upstream, "/health")
            if status == 200 and not before:
                await self._meet(upstream)
            upstream.mark(status == 200 and bool(upstream.models))
        except (BackendFailed, msgspec.MsgspecError, UnicodeDecodeError) as error:
            upstream.mark(False)
            if isinstance(error, _Unusable) and str(error) != upstream.trouble:
                upstream.trouble = str(error)
                log.error("worker %s isn't used: %s", upstream.backend.name, error)
        if not upstream.up:
            self._on_down(number)

    async def _meet(self, upstream: Upstream) -> None:
        status, data = await self.get(upstream, "/v1/models")
        if status != 200:
            why = "; give the router a key of its own with --worker-key" if status in (401, 403) else ""
            raise _Unusable(f"it is healthy, but /v1/models answers {status}{why}")
        models = msgspec.json.decode(data, type=_Models).data
        if not models:
            raise _Unusable("it is healthy, but /v1/models lists no model")
        upstream.models = {model.id: model.parent for model in models}
        upstream.max_context = max((model.max_model_len or 0 for model in models), default=0)
        upstream.ours = (await self.get(upstream, "/forebay/namespace"))[0] == 200

    async def get(self, upstream: Upstream, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of a small question, the router's own if it has no `headers`. Raises BackendFailed."""
        backend, limit = upstream.backend, 2 * self._config.connect_s
        answer = await ask(
            backend.host, backend.port, "GET", path, headers=self._own if headers is None else headers,
            connect_s=self._config.connect_s, silence_s=limit,
        )  # fmt: skip
        async with answer:
            return answer.status, await answer.whole()
