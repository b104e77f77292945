"""Talking to a store: `StoreClient` (blocking) and `AsyncStoreClient` share all but the I/O line."""

from __future__ import annotations

from forebay.kvstore.client.aio import AsyncStoreClient
from forebay.kvstore.client.sync import StoreClient

__all__ = ["AsyncStoreClient", "StoreClient"]
