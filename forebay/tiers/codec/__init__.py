"""Compression and encryption of a chunk's stored bytes, for tiers that want it. Begin with `codec.py`."""
