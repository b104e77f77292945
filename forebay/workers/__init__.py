"""Compute workers: device block pool, batches, transfer to and from the store, the front end and its supervisor."""
