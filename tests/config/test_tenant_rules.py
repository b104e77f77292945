"""Tenants' rules come from tables, a flag or the environment; what can't be kept is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forebay.cli import serve, store
from forebay.cli.tenants import inline, rules_of
from forebay.config import resolve
from forebay.errors import ConfigError
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.tenancy import TenantRule

FILE = """
[store]
memory = "16MiB"

[tenants.alice]
quota = "8MiB"
guarantee = "2MiB"
weight = 2

[tenants."team b"]
weight = 0.5
"""
RULES = {"alice": TenantRule(8 << 20, 2 << 20, 2.0), "team b": TenantRule(weight=0.5)}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "forebay.toml"
    path.write_text(FILE)
    return str(path)


def test_a_table_a_tenant(file: str) -> None:
    assert resolve("store", store.SETTINGS, {"config": file}, {})["tenants"] == RULES
    assert resolve("serve", serve.SETTINGS, {"config": file}, {})["tenants"] == RULES


def test_the_environment_and_flags_take_the_same_inline(file: str) -> None:
    environment = {"FOREBAY_STORE_TENANTS": '{ carol = { quota = "1GiB" } }'}
    values = resolve("store", store.SETTINGS, {"config": file}, environment)
    assert values["tenants"] == {"carol": TenantRule(1 << 30)}
    values = resolve("store", store.SETTINGS, {"tenants": inline(RULES)}, environment)
    assert values["tenants"] == RULES, "what serve hands on is what it was given"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"a": {"quoto": 1}}, "'a' has no setting 'quoto'; it has quota, guarantee, weight"),
        ({"a": {"quota": "much"}}, "'a': quota 'much': takes a size"),
        ({"a": {"quota": True}}, "'a': quota True: takes a size"),
        ({"a": {"weight": 0}}, "'a': weight 0: takes a number from 0.001 to 1000"),
        ({"a": {"weight": "2"}}, "'a': weight '2': takes a number"),
        ({"a": {"quota": "1MiB", "guarantee": "2MiB"}}, "its guarantee is more than its quota"),
        ({"a": 3}, "'a': takes a table"),
        ({"x" * 129: {}}, "a name has 1 to 128 bytes"),
        ({str(n): {} for n in range(257)}, "has 257 tenants; at most 256"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        rules_of(given)


def test_where_a_wrong_rule_stands_is_told(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[tenants.a]\nweight = -1\n")
    with pytest.raises(ConfigError, match=r"\[tenants\] of .*wrong.toml: tenant 'a': weight -1"):
        resolve("store", store.SETTINGS, {"config": str(path)}, {})
    with pytest.raises(ConfigError, match="--tenants 'alice': takes an inline table"):
        resolve("store", store.SETTINGS, {"tenants": "alice"}, {})


def test_more_than_the_pool_cannot_be_guaranteed() -> None:
    rules = {"a": TenantRule(guarantee=9 << 20), "b": TenantRule(guarantee=8 << 20)}
    with pytest.raises(ConfigError, match=r"17825792 bytes are guaranteed in all \(most of them to 'a'\)"):
        StoreConfig(Path("s"), memory=16 << 20, tenants=rules)
    assert StoreConfig(Path("s"), memory=32 << 20, tenants=rules).tenants == rules


def test_a_policy_is_one_that_there_is() -> None:
    assert resolve("store", store.SETTINGS, {"policy": "arc"}, {})["policy"] == "arc"
    assert resolve("serve", serve.SETTINGS, {}, {})["policy"] == StoreConfig(Path("s")).policy
    with pytest.raises(ConfigError, match="--policy 'mru': takes one of lru, arc"):
        resolve("store", store.SETTINGS, {"policy": "mru"}, {})
    with pytest.raises(ConfigError, match="policy 'mru': takes one of lru, arc"):
        StoreConfig(Path("s"), policy="mru")
