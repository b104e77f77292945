"""Tables of tiers: what they take, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.cli import serve
from forebay.cli.store import SETTINGS
from forebay.cli.tiers import inline
from forebay.config import resolve
from forebay.errors import ConfigError
from forebay.kvstore.config import StoreConfig
from forebay.tiers.rules import TierRule


def settled(text: str) -> dict[str, TierRule]:
    rules: dict[str, TierRule] = resolve("store", SETTINGS, {"tiers": text}, {})["tiers"]
    return rules


def test_a_file_names_tiers_with_their_kind_and_options_in_order(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(
        '[tiers.near]\nkind = "fs"\ndirectory = "/near"\nquota_bytes = "2GiB"\n'
        '[tiers.far]\nkind = "mine.module:Tier"\ncopy = "second-hit"\ntimeout_s = "500ms"\npinned_share = "10%"\n'
    )
    tiers = resolve("store", SETTINGS, {"config": str(file)}, {})["tiers"]
    assert list(tiers) == ["near", "far"]
    assert tiers["near"] == TierRule("fs", {"directory": "/near", "quota_bytes": 2 << 30})
    assert tiers["far"] == TierRule("mine.module:Tier", {"timeout_s": 0.5}, "second-hit", 0.1)


def test_serve_hands_its_store_the_tiers_that_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text('[tiers.far]\nkind = "memory"\ncopy = "evict"\nquota_bytes = "1MiB"\n')
    given = resolve("serve", serve.SETTINGS, {"config": str(file)}, {})["tiers"]
    assert settled(inline(given)) == given == {"far": TierRule("memory", {"quota_bytes": 1 << 20}, "evict")}


def test_a_flag_takes_the_same_as_an_inline_table_and_comes_back_from_one() -> None:
    text = '{ a = { kind = "fs", directory = "/a b", deep = true, n = 3 }, b = { kind = "memory", copy = "evict" } }'
    tiers = settled(text)
    assert tiers["a"].options == {"directory": "/a b", "deep": True, "n": 3}
    assert settled(inline(tiers)) == tiers


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{ Disk = { kind = "fs" } }', "'Disk'"),
        ('{ host = { kind = "fs" } }', "neither host"),
        ("{ disk = {} }", "with a kind"),
        ("{ disk = 3 }", "with a kind"),
        ('{ disk = { kind = "fs", copy = "sometimes" } }', "write-through, second-hit, evict"),
        ('{ disk = { kind = "fs", quota_bytes = "lots" } }', "quota_bytes 'lots'"),
        ('{ disk = { kind = "fs", pinned_share = 3 } }', "pinned_share 3"),
        ('{ disk = { kind = "fs", paths = ["/a"] } }', "paths"),
        ("{", "inline table"),
        ("{ " + ", ".join(f't{i} = {{ kind = "fs" }}' for i in range(9)) + " }", "at most 8"),
    ],
)
def test_a_wrong_table_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(text)
    assert "--tiers" in str(caught.value) and told in str(caught.value)


def config(**changes: Any) -> StoreConfig:
    return StoreConfig(Path("/run/x.sock"), **changes)


def test_the_files_of_a_flag_are_the_first_tier() -> None:
    tiers = config(fs=Path("/kv"), fs_quota=1 << 30, tiers={"far": TierRule("memory")}).all_tiers
    assert list(tiers) == ["fs", "far"]
    assert tiers["fs"].options == {"directory": "/kv", "quota_bytes": 1 << 30, "fsync": "none"}


def test_two_tiers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'fs'"):
        config(fs=Path("/kv"), tiers={"fs": TierRule("fs")})
