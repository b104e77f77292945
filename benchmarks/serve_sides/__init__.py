"""Servers of one model, each as its users start it, and a client that sees of all of them the same."""
