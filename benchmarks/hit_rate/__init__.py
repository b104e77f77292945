"""Token hit rate against capacity: `python -m benchmarks.hit_rate` replays a trace, or generated sessions, through the
daemon's eviction policies, beside textbook ones, Belady's optimum and a cache without an end."""
