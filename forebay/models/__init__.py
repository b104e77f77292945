"""Model families, checkpoint loading, tokenizers and chat templates."""

from __future__ import annotations
