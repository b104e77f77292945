"""The setting of tenants' rules: tables `[tenants.NAME]` of a TOML file, or the same as an inline table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from forebay.config import Kind, Setting, at_least, one_of, size
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.policies.registry import POLICY_NAMES
from forebay.kvstore.tenancy import TenantRule

TENANT_BYTES_MAX = 128
RULES_MAX = 256
KNOWN = ("quota", "guarantee", "weight")


def rules_of(table: Mapping[str, Any]) -> dict[str, TenantRule]:
    """Rules by tenant. Raises ValueError that names the tenant and the key, and says what it takes."""
    if len(table) > RULES_MAX:
        raise ValueError(f"has {len(table)} tenants; at most {RULES_MAX} can have rules")
    return {name: _rule(name, rule) for name, rule in table.items()}


def _rule(name: str, given: object) -> TenantRule:
    if not name or len(name.encode()) > TENANT_BYTES_MAX:
        raise ValueError(f"tenant {name!r}: a name has 1 to {TENANT_BYTES_MAX} bytes")
    if not isinstance(given, dict):
        raise ValueError(f'tenant {name!r}: takes a table, such as {{ quota = "8GiB", weight = 2 }}')
    unknown = sorted(set(given) - set(KNOWN))
    if unknown:
        raise ValueError(f"tenant {name!r} has no setting {unknown[0]!r}; it has {', '.join(KNOWN)}")
    quota = _bytes(name, "quota", given["quota"]) if "quota" in given else None
    guarantee = _bytes(name, "guarantee", given["guarantee"]) if "guarantee" in given else 0
    weight = given.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.001 <= weight <= 1000:
        raise ValueError(f"tenant {name!r}: weight {weight!r}: takes a number from 0.001 to 1000")
    if quota is not None and guarantee > quota:
        raise ValueError(f"tenant {name!r}: its guarantee is more than its quota")
    return TenantRule(quota, guarantee, float(weight))


def _bytes(name: str, key: str, given: object) -> int:
    try:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError("takes a size such as 512MiB or 2GiB")
        return int(size(str(given)))
    except ValueError as error:
        raise ValueError(f"tenant {name!r}: {key} {given!r}: {error}") from error


def _read(text: str) -> dict[str, TenantRule]:
    try:
        table = tomllib.loads(f"tenants = {text}")["tenants"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError('takes an inline table, such as { alice = { quota = "8GiB", weight = 2 } }') from error
    if not isinstance(table, dict):
        raise ValueError('takes an inline table, such as { alice = { quota = "8GiB", weight = 2 } }')
    return rules_of(table)


def inline(rules: Mapping[str, TenantRule]) -> str:
    """Rules as the inline table that says the same: for another command's flag."""
    parts = []
    for name, rule in rules.items():
        quota = f"quota = {rule.quota}, " if rule.quota is not None else ""
        guarantee = f"guarantee = {rule.guarantee}, " if rule.guarantee else ""
        parts.append(f"{json.dumps(name, ensure_ascii=False)} = {{ {quota}{guarantee}weight = {rule.weight!r} }}")
    return "{ " + ", ".join(parts) + " }"


TENANTS = Setting(
    "tenants", Kind("TABLE", _read, rules_of), {}, "quota, guarantee and weight of tenants; in a file [tenants.NAME]",
    shown="equal shares",
)  # fmt: skip
POLICY = Setting("policy", one_of(*POLICY_NAMES), StoreConfig.policy, "which of a tenant's chunks goes first")
ATTENTION = Setting(
    "attention_tokens", at_least(0), StoreConfig.attention_tokens,
    "where attention costs the model as much as all else: policy foresight keeps deeper chunks rather; 0: not at all",
)  # fmt: skip
"""All of commands that start a store."""
