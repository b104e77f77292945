"""A whole cluster in one thread on virtual time: daemons, workers, tiers, subscribers, and whatever goes wrong.

    python -m forebay.testing.simulate --seed 7
    python -m forebay.testing.simulate --seed 0 --seeds 2000

Everything that happens follows from the seed: sizes, policies, faults, the order of callbacks, the length of waits.
The parts are the real ones (core, service, reader, cascade, announcer, protocol, clients, tier hosts, subscribers);
what is simulated is below them: loop, network, processes, disks. `docs/testing.md` tells how to read a failure.
"""
