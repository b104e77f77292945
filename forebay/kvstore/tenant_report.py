"""What the store tells about its tenants: accounts, and what another budget would do to each."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.kvstore.core import StoreCore
from forebay.kvstore.curves import Curve, Curves
from forebay.kvstore.protocol import TenantForecast, TenantRow
from forebay.kvstore.tenancy import OTHERS, Account, Claim, divide, shares

CURVE_OCTAVES = 10
LABELS_MAX = 64
"""Tenants that metrics tell apart; the others are summed up under one label."""


def tenant_rows(core: StoreCore, only: str | None = None) -> list[TenantRow]:
    """One row an account, those with the most bytes first; with `only`, that tenant's alone."""
    accounts, total = list(core.place.accounts), core.place.slots.total_bytes
    dormant = set(core.place.accounts.dormant(total))
    fair = shares(total, [account for account in accounts if account.used and account not in dormant])
    shown = [account for account in accounts if only is None or account.name == only]
    shown.sort(key=lambda account: (-account.used, account.name))
    return [_row(account, fair.get(account.name, 0), account in dormant) for account in shown]


def _row(account: Account, share: int, dormant: bool) -> TenantRow:
    rule, counts = account.rule, account.counts
    return TenantRow(
        account.name, account.used, rule.quota, rule.guarantee, rule.weight, share, dormant, counts.evicted,
        counts.suffered, counts.caused, counts.refused, counts.asked_tokens, counts.hit_tokens,
    )  # fmt: skip


def labelled(rows: Sequence[TenantRow], configured: Sequence[str], limit: int = LABELS_MAX) -> dict[str, TenantRow]:
    """Rows by the label that metrics give them: configured tenants first, then those with the most bytes; the rest
    are one row. So the number of labels is bounded, whatever tenants there are."""
    first = sorted(rows, key=lambda row: (row.tenant not in configured, -row.bytes))
    found = {row.tenant: row for row in first[:limit] if row.tenant != OTHERS}
    rest = [row for row in first if row.tenant not in found]
    if rest:
        found[OTHERS] = _sum(rest)
    return found


def _sum(rows: Sequence[TenantRow]) -> TenantRow:
    def total(name: str) -> int:
        return sum(getattr(row, name) for row in rows)

    return TenantRow(
        OTHERS, total("bytes"), None, total("guarantee"), 1.0, total("share"), False, total("evicted"),
        total("suffered"), total("caused"), total("refused"), total("asked_tokens"), total("hit_tokens"),
    )  # fmt: skip


def curve_sizes(budget: int, now: int) -> list[int]:
    """Sizes at which curves are told: octaves up to twice the greater budget."""
    most = 2 * max(budget, now)
    return [most >> step for step in range(CURVE_OCTAVES, -1, -1)]


def foresee(core: StoreCore, curves: Curves, budget: int, only: str | None = None) -> list[TenantForecast]:
    """What each tenant's hit rate would be if the pool had `budget` bytes.

    Memory is divided as evictions by level divide it, each tenant wanting what it has used of late. A hit rate is
    what was measured, plus the difference that the curve sees between the two divisions.
    """
    now = core.place.slots.total_bytes
    asking = {name: curve for name, curve in {**curves.named(), OTHERS: curves.others}.items() if curve.asked}
    claims = [_claim(core, name, curve, asking) for name, curve in asking.items()]
    before, after = divide(now, claims), divide(budget, claims)
    sizes = curve_sizes(budget, now)
    return [
        _forecast(name, curve, held, wanted, sizes)
        for (name, curve), held, wanted in zip(asking.items(), before, after, strict=True)
        if only is None or name == only
    ]


def _claim(core: StoreCore, name: str, curve: Curve, asking: dict[str, Curve]) -> Claim:
    mine = [a for a in core.place.accounts if a.name == name or (name == OTHERS and a.name not in asking)]
    wanted = max(int(curve.footprint), sum(account.used for account in mine))
    if name == OTHERS or not mine:
        return Claim(wanted, 0, 1.0)
    rule = mine[0].rule
    return Claim(wanted if rule.quota is None else min(wanted, rule.quota), rule.guarantee, rule.weight)


def _forecast(name: str, curve: Curve, held: int, wanted: int, sizes: Sequence[int]) -> TenantForecast:
    *rates, now, then = curve.rates([*sizes, held, wanted])
    measured = curve.measured
    expected = min(max((now if measured is None else measured) + then - now, 0.0), max(curve.ceiling, measured or 0.0))
    return TenantForecast(name, held, wanted, measured, expected, curve.ceiling, int(curve.asked), rates)
