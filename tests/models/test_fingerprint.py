"""A fingerprint stands for what the tensors hold, not for how or where they are stored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.models import fingerprint
from forebay.models.errors import CheckpointBroken
from forebay.models.fingerprint import FINGERPRINT_BYTES, MAX_CACHED, fingerprint_weights
from tests import checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.tiny_llama(tmp_path / "model")


def change(path: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(path) | tensors, path)


def test_it_is_the_same_for_every_split_into_files(checkpoint: Path, tmp_path: Path) -> None:
    split = checkpoints.tiny_llama(tmp_path / "split", shard_size="100KB")
    assert len(list(split.glob("*.safetensors"))) > 1
    found = fingerprint_weights(checkpoint, tmp_path / "cache")
    assert len(found) == FINGERPRINT_BYTES
    assert fingerprint_weights(split, tmp_path / "cache") == found


def test_one_bit_changes_it(checkpoint: Path, tmp_path: Path) -> None:
    before = fingerprint_weights(checkpoint, tmp_path / "cache")
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint_weights(checkpoint, tmp_path / "cache") != before


@pytest.mark.parametrize(
    ("field", "value", "counts"),
    [
        ("rms_norm_eps", 0.5, True), ("anything_new", 1, True), ("architectures", ["Other"], False),
        ("dtype", "float16", False),
    ],
)  # fmt: skip
def test_what_the_configuration_computes_counts(
    checkpoint: Path, tmp_path: Path, field: str, value: object, counts: bool
) -> None:
    before = fingerprint_weights(checkpoint, tmp_path / "cache")
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert (fingerprint_weights(checkpoint, tmp_path / "cache") != before) is counts


def test_a_configuration_that_cant_be_read_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointBroken, match=r"config\.json isn't JSON"):
        fingerprint_weights(checkpoint, tmp_path / "cache")


def test_name_dtype_and_shape_count(tmp_path: Path) -> None:
    values = torch.arange(64, dtype=torch.int16).view(torch.bfloat16)
    found = set()
    for name, tensor in (
        ("a", values),
        ("b", values),
        ("a", values.view(8, 8)),
        ("a", values.view(torch.float16)),
    ):
        path = tmp_path / str(len(found))
        path.mkdir()
        save_file({name: tensor}, path / "model.safetensors")
        found.add(fingerprint_weights(path, tmp_path / "cache"))
    assert len(found) == 4


def test_unchanged_files_are_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_weights(checkpoint, tmp_path / "cache")
    monkeypatch.setattr(fingerprint, "_fingerprint", lambda files: pytest.fail("read again"))
    assert fingerprint_weights(checkpoint, tmp_path / "cache") == before


def test_a_replaced_file_is_read_again(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model.safetensors"
    before = fingerprint_weights(checkpoint, tmp_path / "cache")
    stat = path.stat()
    change(path, **{"model.norm.weight": torch.zeros(64)})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert fingerprint_weights(checkpoint, tmp_path / "cache") != before


def test_a_damaged_cache_entry_is_worked_out_again(checkpoint: Path, tmp_path: Path) -> None:
    before = fingerprint_weights(checkpoint, tmp_path / "cache")
    (entry,) = (tmp_path / "cache" / "fingerprints").iterdir()
    kept = entry.read_text()
    entry.write_text("garbage")
    assert fingerprint_weights(checkpoint, tmp_path / "cache") == before
    assert entry.read_text() == kept


def test_the_cache_has_a_cap(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "fingerprints"
    folder.mkdir(parents=True)
    for index in range(MAX_CACHED + 5):
        (folder / str(index)).write_text("")
        os.utime(folder / str(index), (index, index))
    fingerprint_weights(checkpoint, tmp_path / "cache")
    left = {path.name for path in folder.iterdir()}
    assert len(left) == MAX_CACHED
    assert not left & {"0", "1", "2", "3", "4", "5"}


def test_a_cut_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    for cut in (0, 7, 8, 500, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointBroken, match="download it again"):
            fingerprint_weights(checkpoint, tmp_path / "cache")
