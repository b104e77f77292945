"""For tests and benchmarks, ours and others': real processes on this machine, driven from outside.

Needs the `test` extra (httpx).
"""
