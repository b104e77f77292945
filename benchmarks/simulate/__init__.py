"""A cluster on virtual time: `python -m benchmarks.simulate`.

The real index, event feed, policies of routing and of eviction run over modelled workers, links and tiers
(docs/hardware.md); printed is what each policy of routing comes to.
"""
