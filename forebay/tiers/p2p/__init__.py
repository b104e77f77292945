"""Chunks from other hosts' stores, and chunks pushed to them."""
