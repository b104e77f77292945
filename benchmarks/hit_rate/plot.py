"""The curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Measure

STYLES: dict[str, dict[str, Any]] = {
    "optimum": {"color": "black", "linestyle": "--"},
    "foresight": {"color": "tab:red", "linewidth": 2.5},
    "lru": {"color": "tab:blue"},
    "arc": {"color": "tab:green"},
    "s3fifo": {"color": "tab:orange"},
}


class PlotError(Exception):
    """Nothing can be drawn here; the message says what helps."""


def check() -> None:
    """Can anything be drawn? Raises PlotError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError("to draw, install the package matplotlib (pip install 'forebay[plot]')") from error


def curves(measures: Sequence[Measure]) -> dict[str, list[tuple[float, float]]]:
    """(capacity, rate) of each policy, from measures named `CAPACITY M, POLICY`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in measures:
        capacity, _, policy = one.name.partition(" M, ")
        if policy and "textbook" not in policy:
            found.setdefault(policy, []).append((float(capacity), one.value))
    return found


def draw(measures: Sequence[Measure], title: str, path: Path) -> None:
    """Hit rate against capacity, one line a policy, into a file whose suffix says its format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=120)
    for name, points in curves(measures).items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name, **STYLES[name])
    infinite = next((one.value for one in measures if one.name == "infinite"), None)
    if infinite is not None:
        axes.axhline(infinite, color="grey", linewidth=0.8, label="infinite")
    capacities = sorted({x for points in curves(measures).values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(capacities, [f"{x:g}" for x in capacities])
    axes.set(xlabel="capacity, millions of tokens", ylabel="token hit rate, %", title=title)
    axes.set_ylim(bottom=0)
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
