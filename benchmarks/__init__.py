"""Side-by-side measurements. Each is a command, `python -m benchmarks.NAME [--json]`."""
