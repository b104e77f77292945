"""Eviction policies behind one interface. `registry` makes them by name."""
