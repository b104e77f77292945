"""Secondary tiers behind one small interface. Each runs in a process of its own; the daemon only plans."""
