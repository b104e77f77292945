"""The store: chunk identity, canonical layout, host pool, index, leases, policies, cascade, daemon, client.

Knows no torch, no model and no GPU: it can run where only bytes are.
"""
