"""Every family's logits are transformers' within 1e-4 in fp32: however the tokens are cut into batches, and after a hit
at every boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from forebay.models.base import CausalLM
from forebay.models.loading import load_model, read_info
from tests import checkpoints
from tests.parity.families import FAMILIES
from tests.parity.reference import Runner, reference_logits

LENGTH, UNIT = 90, 16
WITHIN = 1e-4
CPU = torch.device("cpu")

VARIANTS = {f"{name}-{variant}": make for name, family in FAMILIES.items() for variant, make in family.variants.items()}


def token_ids(length: int = LENGTH, seed: int = 1) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(4, checkpoints.VOCAB, (length,), generator=rng).tolist()


def load(path: Path) -> CausalLM:
    return load_model(path, dtype=torch.float32, device=CPU)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=WITHIN)


@dataclass(frozen=True)
class Case:
    """One family's model, and what transformers computes for one sequence."""

    path: Path
    model: CausalLM
    ids: list[int]
    wanted: torch.Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = FAMILIES[request.param].make(tmp_path_factory.mktemp(request.param))
    ids = token_ids()
    return Case(path, load(path), ids, reference_logits(path, ids, torch.float32))


def test_prefill(case: Case) -> None:
    assert_same(Runner(case.model).step({0: case.ids}), case.wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(variant: str, tmp_path: Path) -> None:
    make: Callable[[Path], Path] = VARIANTS[variant]
    path, ids = make(tmp_path), token_ids()
    assert_same(Runner(load(path)).step({0: ids}), reference_logits(path, ids, torch.float32))


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked_prefill(case: Case, chunk: int) -> None:
    """With a chunk of one it is decoding, token by token."""
    runner = Runner(case.model)
    pieces = [case.ids[at : at + chunk] for at in range(0, LENGTH, chunk)]
    assert_same(torch.cat([runner.step({0: piece}) for piece in pieces]), case.wanted)


def test_batch_of_mixed_lengths(case: Case) -> None:
    """Prefixes of one sequence, each advancing by a step of its own: prefill chunks and decodes meet in a batch."""
    lengths = {0: 1, 1: 90, 2: 17, 3: 40, 4: 64, 5: 88}
    strides = {0: 1, 1: 33, 2: 1, 3: 7, 4: 16, 5: 29}
    runner, at = Runner(case.model), dict.fromkeys(lengths, 0)
    while any(at[key] < length for key, length in lengths.items()):
        pieces = {
            key: case.ids[at[key] : min(at[key] + strides[key], length)]
            for key, length in lengths.items()
            if at[key] < length
        }
        logits = runner.step(pieces).split([len(piece) for piece in pieces.values()])
        for (key, piece), rows in zip(pieces.items(), logits, strict=True):
            assert_same(rows, case.wanted[at[key] : at[key] + len(piece)])
            at[key] += len(piece)


def test_hit_at_every_boundary(case: Case) -> None:
    """Canonical bytes of every unit go out of one pool and into another, which goes on from there."""
    donor, units = Runner(case.model), []
    for at in range(0, LENGTH // UNIT * UNIT, UNIT):
        donor.step({0: case.ids[at : at + UNIT]})
        units.append(donor.export(0, at // UNIT))
    for hit in range(1, len(units) + 1):
        runner = Runner(case.model, seed=hit)
        runner.adopt(0, units[:hit])
        assert_same(runner.step({0: case.ids[hit * UNIT :]}), case.wanted[hit * UNIT :])


def test_facts_come_without_weights(case: Case) -> None:
    info = read_info(case.path)
    assert info == case.model.info
    kept = [layer for group in info.kv_groups if group.kind != "indexer" for layer in group.layers]
    assert sorted(kept) == list(range(info.num_layers))
    for group in info.kv_groups:
        pool = case.model.new_pools({g.name: 2 for g in info.kv_groups})[group.name]
        assert pool[0].numel() * pool.itemsize == group.granule_bytes(torch.float32)


def test_bf16_stays_near_fp32(case: Case) -> None:
    """Most rows do. Where two experts' scores nearly tie, another one may be chosen, and the row is another; so it is
    with positions that a layer chooses, of which there are many more."""
    rounded = load_model(case.path, dtype=torch.bfloat16, device=CPU)
    found = Runner(rounded).step({0: case.ids})
    assert found.dtype == torch.float32
    likeness = torch.nn.functional.cosine_similarity(found, case.wanted)
    assert likeness.median() > (0.99 if case.model.info.sparse is None else 0.9)
