"""Other projects' routers before our workers; run by `make test-consumers`."""
