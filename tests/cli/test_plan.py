"""`forebay plan` says what fits, from a configuration alone, and refuses what can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.cli.main import main
from tests.models.test_capacity import DEEPSEEK_V3, GLM_52, LLAMA


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_it_prints_a_line_for_each_context(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpu-memory", "80GiB", "--weights", "15GiB", "--host-memory", "64GiB", "--files", "1TiB"]
    assert main(["plan", str(llama), *sizes]) == 0
    text = capsys.readouterr().out
    assert "a token takes 131,072 bytes in the store" in text and "15.0 GiB of weights" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("4,096", "131,072"))]
    assert [row[0] for row in rows] == ["4,096", "131,072"]
    assert rows[1][1:5] == ["16.0", "GiB", "16.0", "GiB"] and rows[1][5:] == ["3", "393,216", "4", "64"]


def test_as_objects_it_can_be_read_by_programs(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(llama), "--gpu-memory", "80GiB", "--context", "8192", "--tp", "2", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["context"] for one in found] == [4096, 8192]
    assert found[1]["rank_bytes"] == 8192 * 131_072 // 2 and found[1]["store_bytes"] == 8192 * 131_072
    assert found[0]["host_requests"] is None


def test_sharing_tokens_out_holds_as_many_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    asked = ["plan", str(tmp_path), "--gpu-memory", "141GiB", "--weights", "680GiB", "--tp", "8", "--json"]
    counts = []
    for dcp in ("1", "8"):
        assert main([*asked, "--dcp", dcp]) == 0
        counts.append(json.loads(capsys.readouterr().out.splitlines()[3])["requests"])
    assert counts[0] > 0 and 8 * counts[0] <= counts[1] <= 8 * counts[0] + 8


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 2, "--gpu-memory"), (["--gpu-memory", "1GiB"], 2, "leave nothing for KV"),
        (["--gpu-memory", "80GiB", "--tp", "8", "--dcp", "2"], 2, "dcp 2"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(
    llama: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, said: str
) -> None:
    assert main(["plan", str(llama), *flags]) == code
    assert said in capsys.readouterr().err


def test_a_plot_is_drawn_or_the_package_named(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = llama / "plan.png"
    code = main(["plan", str(llama), "--gpu-memory", "80GiB", "--plot", str(target)])
    if code == 0:
        assert target.read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib" in capsys.readouterr().err


def test_hot_buffers_let_several_times_as_many_be_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_52))
    asked = ["plan", str(tmp_path), "--gpu-memory", "141GiB", "--weights", "704GiB", "--tp", "8", "--kv-dtype", "fp8"]
    hot = ["--index-cache-dtype", "fp8", "--hot-buffer-rows", "4096", "--host-memory", "1536GiB"]
    assert main([*asked, *hot, "--json"]) == 0
    longest = [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]
    kv, context = int((141 << 30) * 0.92) - (88 << 30) - (4 << 30), 202_752
    assert longest["context"] == context and longest["full"] == kv // (47_700 * context)
    assert longest["device"] == kv // (2_772 * context + 16 * 78 * 576 * (4096 // 16 + 34))
    assert longest["requests"] == longest["device"] >= 3 * longest["full"]
    assert main([*asked, *hot]) == 0 and "hot: host limit" in capsys.readouterr().out
    assert main([*asked, *hot[:4]]) == 2 and "--host-memory" in capsys.readouterr().err
