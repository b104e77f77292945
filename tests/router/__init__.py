"""The router, from its parts to whole clusters."""
