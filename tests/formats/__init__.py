"""Every on-disk and wire format, each byte flipped and cut at each length: a miss or a typed error, never more."""
