"""A llama.cpp server, by whoever's interpreter has the package `xllamacpp`: prints its address, and serves until its
input ends. Run as a file, since that interpreter need not have ours.

    python llama.py MODEL.gguf THREADS STREAMS CONTEXT
"""

from __future__ import annotations

import sys


def main() -> None:
    """Serve."""
    import xllamacpp

    model, threads, streams, context = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = streams
    params.n_ctx = context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
