"""Chunks in the pooled memory of many hosts, kept by Mooncake Store. Begin with `tier.py`."""
