"""Ports for servers of tests."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from forebay.testing import ports


def test_ports_differ_and_none_is_the_kernels_to_give_away() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = ports.free_ports(50)
    assert len(set(found)) == 50 and all(ports.LOWEST <= port < lowest for port in found)


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        (port,) = taken.getsockname()[1:]
        tries = iter([port, port, port + 1, port + 2, port + 3])
        monkeypatch.setattr(ports._random, "randrange", lambda *_: next(tries))
        assert ports.free_port() > port
