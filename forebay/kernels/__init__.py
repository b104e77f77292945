"""Attention and cache movement: each operation as a torch reference that runs on any device."""

from __future__ import annotations
