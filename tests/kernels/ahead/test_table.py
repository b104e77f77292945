"""The page's budgets: read as they were written, and what exceeds them is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton isn't installed: pip install 'forebay[triton]'")

from forebay.errors import ConfigError
from forebay.kernels.ahead import table
from forebay.kernels.ahead.cases import CASES
from forebay.kernels.ahead.inspect import Built
from forebay.kernels.ahead.targets import TARGETS, target_of
from tests.kernels.ahead.compiling import KERNELS, PAGE, command

ROWS = [
    table.Row("sm_90", "attend_kernel", "prefill, Llama 3 8B", "rows 128", Built(184, 0, 49152, "wgmma")),
    table.Row("sm_90", "move_kernel", "half of the heads", "", Built(40, 16, 0, "")),
    table.Row("gfx950", "move_kernel", "half of the heads", "", Built(26, 0, 0, "")),
]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    found = tmp_path / "kernels.md"
    found.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    table.write(found, ROWS)
    return found


def test_what_was_written_is_within_what_is_read(page: Path) -> None:
    allowed = table.budgets(page)
    assert allowed.keys() == {row.key for row in ROWS}
    assert table.complaints(ROWS, allowed) == []
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text


@pytest.mark.parametrize(("change", "complaint"), [
    ({"registers": 255}, "255 registers, 200 at most"),
    ({"stack": 8}, "8 bytes of stack, 0 at most: it spills"),
    ({"tensor": "mma"}, "tensor instructions 'mma', not 'wgmma'"),
    ({"tensor": ""}, "tensor instructions 'none', not 'wgmma'"),
])  # fmt: skip
def test_what_is_worse_is_told(page: Path, change: dict[str, object], complaint: str) -> None:
    worse = replace(ROWS[0], built=replace(ROWS[0].built, **change))
    found = table.complaints([worse, *ROWS[1:]], table.budgets(page))
    assert found == [f"sm_90, attend_kernel, prefill, Llama 3 8B, rows 128: {complaint}"]


def test_a_kernel_without_a_budget_is_told(page: Path) -> None:
    other = replace(ROWS[0], launch="rows 64")
    assert "no budget" in table.complaints([other], table.budgets(page))[0]


def test_a_page_without_a_place_for_tables_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "other.md"
    page.write_text("text", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no"):
        table.write(page, ROWS)
    assert page.read_text(encoding="utf-8") == "text"


def test_the_page_has_a_budget_for_every_kernel_target_and_shipped_size() -> None:
    allowed = table.budgets(PAGE)
    for target in TARGETS.values():
        for case in CASES:
            if case.only(target):
                for sizes in case.sizes(target):
                    assert (target.name, case.kernel, case.model, table.launch_text(sizes)) in allowed


def test_every_kernel_with_products_has_tensor_instructions_everywhere() -> None:
    for (target, kernel, *rest), budget in table.budgets(PAGE).items():
        wanted = kernel in ("attend_kernel", "latent_kernel", "sparse_kernel", "score_kernel", "products_kernel")
        assert bool(budget.tensor) == wanted, (target, kernel, rest)


def test_another_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="sm_90, sm_100, gfx942, gfx950"):
        target_of("sm_10")


@pytest.mark.parametrize("command_line", [["bench"], ["tune", "--out", "table.json"]])
def test_what_needs_a_gpu_says_so(command_line: list[str]) -> None:
    found = command(*command_line)
    assert found.returncode == 4 and "finds none on this machine" in found.stderr


def test_all_kernels_have_a_case() -> None:
    assert len({case.kernel for case in CASES}) == KERNELS
