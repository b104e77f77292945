"""Tables of `forebay stat` about tenants: their accounts, and what another budget would do."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from forebay.cli.tables import bytes_text, table
from forebay.config import Kind, size
from forebay.kvstore.protocol import Foreseen, TenantForecast, TenantRow

CURVES_SHOWN = 8
FORECAST = ("tenant", "holds now", "hit rate", "would hold", "hit rate then", "ceiling")


def _change(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([+=-])(.+)", text.strip())
    if match is None:
        raise ValueError("takes a change such as +64GiB or -8GiB, or a budget such as =32GiB")
    return match[1], int(size(match[2]))


change = Kind("+SIZE|-SIZE|=SIZE", _change)


def budget_of(now: int, wanted: tuple[str, int]) -> int:
    """The budget after a change of the present one. Raises ValueError if nothing is left."""
    sign, amount = wanted
    budget = amount if sign == "=" else now + amount if sign == "+" else now - amount
    if budget <= 0:
        raise ValueError(f"{bytes_text(now)} less {bytes_text(amount)} leaves nothing")
    return budget


def tenants_table(rows: Sequence[TenantRow]) -> str:
    """One line a tenant."""
    head = (
        "tenant", "bytes", "share", "quota", "guarantee", "weight", "hit rate", "hit tokens", "evicted", "suffered",
        "caused", "refused",
    )  # fmt: skip
    lines = [
        [
            _name(row.tenant) + (" (dormant)" if row.dormant else ""), bytes_text(row.bytes), bytes_text(row.share),
            "-" if row.quota is None else bytes_text(row.quota), bytes_text(row.guarantee) if row.guarantee else "-",
            f"{row.weight:g}", _rate(row.hit_tokens / row.asked_tokens if row.asked_tokens else None),
            f"{row.hit_tokens:,}", f"{row.evicted:,}", f"{row.suffered:,}", f"{row.caused:,}", f"{row.refused:,}",
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines, right=range(1, len(head)))


def tenants_json(rows: Sequence[TenantRow]) -> list[dict[str, Any]]:
    """One object a tenant."""
    return [{name: getattr(row, name) for name in row.__struct_fields__} for row in rows]


def forecast_text(told: Foreseen) -> str:
    """What is to be expected, and the curves behind it."""
    lines = [
        [
            _name(t.tenant), bytes_text(t.held), _rate(t.measured), bytes_text(t.wanted), _rate(t.expected),
            _rate(t.ceiling),
        ]
        for t in told.tenants
    ]  # fmt: skip
    parts = [f"a pool of {bytes_text(told.budget)} instead of {bytes_text(told.budget_now)}", ""]
    if not told.tenants:
        return "\n".join([*parts, "nobody has asked for anything yet"])
    parts += [table(FORECAST, lines, right=range(1, len(FORECAST))), "", _curves(told)]
    return "\n".join(parts)


def _curves(told: Foreseen) -> str:
    most: list[TenantForecast] = sorted(told.tenants, key=lambda t: -t.asked)[:CURVES_SHOWN]
    head = ("if it had", *(_name(t.tenant) for t in most))
    lines = [[bytes_text(size), *(_rate(t.rates[n]) for t in most)] for n, size in enumerate(told.sizes)]
    shown = table(head, lines, right=range(len(head)))
    hidden = len(told.tenants) - len(most)
    return shown + (f"\n\n{hidden} more tenants: see --json" if hidden else "")


def forecast_json(told: Foreseen) -> str:
    """All of it as one line."""
    tenants = [{name: getattr(t, name) for name in t.__struct_fields__} for t in told.tenants]
    return json.dumps({"budget_now": told.budget_now, "budget": told.budget, "sizes": told.sizes, "tenants": tenants})


def _name(tenant: str) -> str:
    return tenant or "(default)"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"
