"""Aligned tables and human figures for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def plain(text: str) -> str:
    """What somebody else has named, as it may go to a terminal: no control characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """An aligned table; columns in `right` are flush right."""
    lines = [head, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def bytes_text(count: float) -> str:
    """1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def figure(name: str, value: float) -> str:
    """A figure as people read it: bytes where the name says so."""
    if "bytes" in name:
        return bytes_text(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"
