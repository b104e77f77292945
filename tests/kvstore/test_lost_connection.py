"""What a client says without waiting for an answer, on a connection that is gone."""

from __future__ import annotations

import asyncio
import socket

import pytest

from forebay.kvstore.client import AsyncStoreClient


class Dialled(AsyncStoreClient):
    """A client whose store has just gone, which it hasn't noticed yet."""

    def lose(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket, self._loop = ours, asyncio.get_running_loop()
        theirs.close()


@pytest.mark.parametrize("what", ["release", "abort", "damaged", "touch_soon"])
def test_what_has_no_answer_is_silent_on_a_connection_that_is_found_to_be_lost(what: str) -> None:
    async def say() -> None:
        client = Dialled("unix:///nowhere.sock")
        client.lose()
        assert client.connected
        getattr(client, what)([] if what != "release" else [1])
        assert not client.connected

    asyncio.run(say())
