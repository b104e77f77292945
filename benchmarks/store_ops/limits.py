"""What the machine gives at best: a bare round trip over a unix socket, and memcpy with a checksum."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.report import median
from forebay.ipc.sockets import SEND_BUFFER_BYTES

ROUNDS = 400


def round_trip_s(question: int, answer: int) -> float:
    """Seconds until `answer` bytes come back for `question` bytes, from another process that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "echo.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            child = os.fork()
            if child == 0:
                _answer(listener, question, answer)
                os._exit(0)
        with socket.socket(socket.AF_UNIX) as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            mine.connect(path)
            data, times = b"q" * question, []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                mine.sendall(data)
                _receive(mine, answer)
                times.append(time.perf_counter() - start)
        os.waitpid(child, 0)
    return median(times)


def _answer(listener: socket.socket, question: int, answer: int) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    data = b"a" * answer
    while _receive(connection, question):
        connection.sendall(data)


def _receive(connection: socket.socket, length: int) -> bool:
    while length:
        got = len(connection.recv(min(length, 1 << 18)))
        if not got:
            return False
        length -= got
    return True


def copy_s(length: int, piece: int, *, hash_too: bool) -> float:
    """Seconds for a memcpy of `length` bytes that aren't in the caches, in pieces; with one xxh3 of each if wanted."""
    source = np.random.default_rng(1).integers(0, 255, 256 << 20, dtype=np.uint8)
    target = np.zeros(256 << 20, dtype=np.uint8)
    times: list[float] = []

    def once(at: int) -> None:
        for begin in range(at, at + length, piece):
            target[begin : begin + piece] = source[begin : begin + piece]
            if hash_too:
                xxhash.xxh3_64_intdigest(target[begin : begin + piece].data)

    for round_ in range(12):
        at = round_ * length % (len(source) - length + 1) // piece * piece
        start = time.perf_counter()
        once(at)
        times.append(time.perf_counter() - start)
    return median(times)
