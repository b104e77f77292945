"""The front end: an OpenAI-compatible HTTP server that is a process of its own and outlives its worker."""
