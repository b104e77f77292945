"""Typed messages over unix sockets: frames, descriptor passing, peer credentials."""
