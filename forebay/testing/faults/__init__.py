"""Tiers and devices in which things go wrong, as often as they are told, from a seed.

    tier.py     around any tier: it fails, raises, hangs, dies, loses results, and lies
    files.py    below the file tier: a disk with errors, short reads and writes, flipped bits, no room, hangs
    memory.py   below the memory tier: bits flip
    dice.py     when
Between a tier and its server: `forebay.testing.chaosproxy`.
"""
