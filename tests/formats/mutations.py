"""What can befall a piece of bytes, and samples of messages to do it to."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

PATTERNS = (0x01, 0x80, 0xFF)


def flips(data: bytes, *, patterns: tuple[int, ...] = PATTERNS, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """Each so manieth byte xor each pattern: the place, and the whole."""
    for at in range(0, len(data), step):
        for pattern in patterns:
            yield at, data[:at] + bytes([data[at] ^ pattern]) + data[at + 1 :]


def cuts(data: bytes, *, step: int = 1) -> Iterator[bytes]:
    """Every shorter beginning."""
    for length in range(0, len(data), step):
        yield data[:length]


def sample(kind: Any) -> Any:
    """A value of a type: structs with all their fields set, containers with one item."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: sample(field.type) for field in msgspec.structs.fields(kind)})
    plain: dict[Any, Any] = {int: 7, float: 0.5, bool: True, str: "text", bytes: b"k" * 32, type(None): None, Any: 3}
    if kind in plain:
        return plain[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return sample(next(argument for argument in arguments if argument is not type(None)))
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if origin is tuple:
        return tuple(sample(argument) for argument in arguments if argument is not ...)
    assert isinstance(origin, type) and arguments, f"no sample for {kind}"
    return [sample(arguments[0])]


def messages(union: Any) -> list[Any]:
    """One sample of every message of a protocol."""
    union = getattr(union, "__value__", union)
    found = [sample(kind) for kind in typing.get_args(union)]
    assert found
    return found
