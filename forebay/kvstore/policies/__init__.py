"""Eviction policies behind one interface."""
