"""Forebay: a KV cache for language model serving that outlives its workers."""

from __future__ import annotations

__version__ = "0.1.0"
