"""A streamed answer as a client reads it: every token with the moment at which it came."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

from forebay.testing import web
from forebay.testing.cluster import Cluster

PATIENCE_S = 120.0


class Stream(threading.Thread):
    """Reads from its start on. With `leave_after` it goes away after so many tokens."""

    def __init__(
        self, cluster: Cluster, frontend: str, prompt: list[int], length: int, leave_after: int | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.ids: list[int] = []
        self.times: list[float] = []
        self.error: str | None = None
        self.status = 0
        self.cached: int | None = None
        self.finish: str | None = None
        self._url = f"{cluster.url(frontend)}/v1/completions"
        self._body = cluster.body(prompt, length, stream=True, stream_options={"include_usage": True}) | more
        self._leave_after = leave_after
        self._grown = threading.Condition()
        self.start()

    def run(self) -> None:
        try:
            with web.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as answer:
                self.status = answer.status_code
                if answer.status_code != 200:
                    self.error = answer.read().decode()
                    return
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
                    if self._leave_after is not None and len(self.ids) >= self._leave_after:
                        return
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__} {error}"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            with self._grown:
                self.times += [time.monotonic()] * len(new)
                self.ids += new
                self._grown.notify_all()
            self.finish = choice["finish_reason"] or self.finish
        if event.get("usage"):
            self.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def reach(self, tokens: int) -> None:
        """Wait until so many tokens have come, and no longer: a poll would let dozens pass."""
        with self._grown:
            reached = self._grown.wait_for(lambda: len(self.ids) >= tokens or not self.is_alive(), PATIENCE_S)
        assert reached and len(self.ids) >= tokens, f"{len(self.ids)} of {tokens} tokens came: {self.error}"

    def done(self) -> list[int]:
        """Wait for the end; the tokens. Fails if there was an error."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"a stream hangs after {len(self.ids)} tokens"
        assert self.error is None, self.error
        return self.ids
