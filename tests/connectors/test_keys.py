"""Keys of requests: the same as our own worker's, and different for whatever changes KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.connectors.adapters import Adapters
from forebay.connectors.keys import Input, RequestKeys, extra_of, is_digest, salt_of
from forebay.kvstore.identity import Chain, GroupGeometry, Namespace, pack_tokens, root_key

NAMESPACE = Namespace(
    weights=b"w" * 32, groups=(GroupGeometry("full", "full", (0, 1), 2, 32, "float32"),), chunk_tokens=32
)


@given(st.lists(st.integers(0, 500), max_size=200), st.integers(0, 200), st.sampled_from([b"", b"x" * 32]))
def test_keys_are_those_of_our_own_workers_chain(tokens: list[int], limit: int, extra: bytes) -> None:
    keys = RequestKeys(NAMESPACE, b"", extra)
    prefix = keys.prefix(tokens, limit)
    chain = Chain(root_key(NAMESPACE.id), tokens, extra, chunk_tokens=32)
    assert prefix.limit == min(limit, len(tokens)) // 16 * 16
    assert prefix.keys == chain.chunk_keys(prefix.limit // 16)
    for start in range(0, len(tokens) // 32 * 32 + 1, 32):
        assert keys.parent(start, lambda first, last: tokens[first:last]) == chain.key_at(start)
        rest = tokens[start : start + 32]
        if len(rest) >= 16:
            short = rest[: len(rest) // 16 * 16]
            assert keys.key(chain.key_at(start), pack_tokens(short)) == chain.key_at(start + len(short))


def test_what_was_looked_up_is_not_hashed_again() -> None:
    keys = RequestKeys(NAMESPACE, b"", b"")
    keys.prefix(list(range(100)), 100)

    def never(first: int, last: int) -> list[int]:
        raise AssertionError((first, last))

    assert keys.parent(96, never)


def test_only_who_has_neither_tenant_nor_salt_shares_with_an_open_server() -> None:
    assert salt_of(b"", "", None) == salt_of(b"", "", "") == b""
    salts = [salt_of(secret, tenant, salt) for secret in (b"", b"s" * 16) for tenant in ("", "a", "ab")
             for salt in ("", "b", "ab") if tenant or salt]  # fmt: skip
    assert len(set(salts)) == len(salts) and b"" not in salts


def test_whatever_changes_kv_is_in_extra() -> None:
    one, two = Input("image:aa", 3, 16), Input("image:bb", 3, 16)
    extras = [
        extra_of(b"", []), extra_of(b"a", []), extra_of(b"b", []), extra_of(b"", [one]), extra_of(b"", [two]),
        extra_of(b"", [one, two]), extra_of(b"", [two, one]), extra_of(b"a", [one]),
        extra_of(b"", [Input("image:aa", 4, 16)]), extra_of(b"", [Input("image:aa", 3, 17)]),
    ]  # fmt: skip
    assert extras[0] == b"" and len(set(extras)) == len(extras)


def test_a_name_that_a_client_gave_is_no_hash() -> None:
    assert is_digest("0f" * 32) and is_digest("0f" * 64)
    assert not any(is_digest(name) for name in ("", "cat.png", "0F" * 32, "0f" * 31, "lora:" + "0f" * 32))


def _adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_an_adapter_is_its_contents_whatever_it_is_called(tmp_path: Path) -> None:
    adapters = Adapters()
    one = adapters.fingerprint(_adapter(tmp_path / "one", b"123"))
    assert adapters.fingerprint(_adapter(tmp_path / "copy", b"123")) == one
    assert adapters.fingerprint(_adapter(tmp_path / "two", b"124")) != one
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"1234")
    assert adapters.fingerprint(tmp_path / "one") != one
    assert len(adapters) == 4


def test_an_engines_adapter_that_is_written_anew_is_not_told_any_more(tmp_path: Path) -> None:
    """The engine may have read either, at any time."""
    adapters = Adapters()
    folder = _adapter(tmp_path / "one", b"123")
    first = adapters.of_engine(1, folder)
    assert adapters.of_engine(1, folder) == first == adapters.of_engine(2, _adapter(tmp_path / "copy", b"123"))
    for contents in (b"1234", b"123"):
        (folder / "adapter_model.safetensors").write_bytes(contents)
        with pytest.raises(ValueError, match="another name"):
            adapters.of_engine(1, folder)
    assert adapters.of_engine(3, folder) == first


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 files"):
        Adapters().fingerprint(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        Adapters().fingerprint(tmp_path / "absent")


def test_the_cache_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.connectors.adapters.CACHED_MAX", 2)
    adapters = Adapters()
    for index in range(4):
        adapters.of_engine(index, _adapter(tmp_path / str(index), bytes([index])))
    assert len(adapters) == 2 == len(adapters._first)
