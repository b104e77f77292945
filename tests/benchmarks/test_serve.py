"""benchmarks.serve and benchmarks.multiturn: what they make of what they measured, and servers that really stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import multiturn, serve
from benchmarks.report import Report
from benchmarks.serve_sides.client import Seen, ask, decode_tokens_s, fresh_prompts, prefill_tokens_s
from benchmarks.serve_sides.servers import Ours, cpu_s, memory, standing
from forebay.testing.cluster import Cluster
from tests.checkpoints import tiny_qwen3


def test_a_stream_is_as_fast_as_what_comes_after_its_first_token() -> None:
    assert Seen(1.0, 3.0, 21, 100, 0).tokens_s == pytest.approx(10.0)


def test_an_interval_holds_the_ratio_and_narrows_with_agreement() -> None:
    low, ratio, high = serve.interval([1.0, 1.0, 1.0, 1.0], [1.01, 0.99, 1.02, 1.02])
    assert low < ratio < high and ratio == pytest.approx(1.01)
    assert serve.interval([1.0, 2.0], [1.5, 3.0]) == (1.5, 1.5, 1.5)


def test_ours_is_held_against_vllm_and_a_missed_target_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    peer = {"prefill 4096, tok/s": 100.0, "decode 4, tok/s": 50.0, "memory, MB": 900.0, "resident, MB": 2000.0}
    ours = {"prefill 4096, tok/s": 95.0, "decode 4, tok/s": 44.0, "memory, MB": 950.0, "resident, MB": 1000.0}
    for figures, code in ((ours, 1), (ours | {"decode 4, tok/s": 46.0, "memory, MB": 800.0}, 0)):
        report = Report("t")
        serve.tell_peers(report, {"forebay": serve.Found(figures), "vllm": serve.Found(peer)})
        assert report.print(True) == code
    missed = [one.name for one in _report(ours, peer).measures if one.ok is False]
    assert missed == ["forebay: decode 4", "forebay: memory"]
    capsys.readouterr()


def _report(ours: dict[str, float], peer: dict[str, float]) -> Report:
    report = Report("t")
    serve.tell_peers(report, {"forebay": serve.Found(ours), "vllm": serve.Found(peer)})
    return report


def test_overhead_is_of_cpu_seconds_each_against_the_one_before() -> None:
    costs = {
        "alone": serve.Cost([1.0] * 4, [1.0] * 4), "attached": serve.Cost([1.01] * 4, [2.0] * 4),
        "pushing": serve.Cost([1.05] * 4, [2.0] * 4),
    }  # fmt: skip
    report = Report("t")
    serve.tell_overhead(report, costs, 6144.0)
    assert [one.ok for one in report.measures] == [True, None, False, None, None]
    assert report.measures[-1].value == 6144.0


def test_what_the_picture_shows_is_checked(tmp_path: Path) -> None:
    counts, holds = [8, 32, 128], {"device": 12, "memory": 48, "files": 192}
    shares = {"recompute": (0, 0, 0), "device": (90, 10, 0), "memory": (90, 90, 5), "files": (90, 90, 90)}
    found = {
        (kind, count): multiturn.Ran(1000 + 40 * share, share / 100)
        for kind, row in shares.items() for count, share in zip(counts, row, strict=True)
    }  # fmt: skip
    report = Report("t")
    multiturn.tell(report, found, counts, holds)
    assert [one.name for one in report.measures if one.ok] == [
        "128 conversations: files (90 % found)", "device falls off at",
    ]  # fmt: skip
    slow = found | {("files", 128): multiturn.Ran(1900, 0.9)}
    report = Report("t")
    multiturn.tell(report, slow, counts, holds)
    assert [one.name for one in report.measures if one.ok is False] == ["128 conversations: files (90 % found)"]
    pytest.importorskip("matplotlib", reason="pictures take matplotlib, which is no part of the tests' environment")
    multiturn.draw(found, counts, holds, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_servers_stand_answer_and_are_measured_and_conversations_find_what_they_left(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tiny_qwen3(tmp_path / "model"))
    server = Ours("w", cluster)
    prompts = [[3 + token % 400 for token in prompt] for prompt in fresh_prompts(2, 64, 1)]
    try:
        with standing(server):
            before = cpu_s(server)
            assert prefill_tokens_s(server, prompts) > 0 and decode_tokens_s(server, prompts, 4) > 0
            assert cpu_s(server) > before
            used = memory(server)
            assert 0 < used.proportional < used.resident
            seen = ask(server, prompts[0], 4, return_token_ids=True)
            assert len(seen.token_ids) == 4 and seen.cached_tokens >= 32
            assert serve.pushed(server) > 0
    finally:
        cluster.stop()


def test_points_of_conversations_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "points"
    assert multiturn.kept(path) == multiturn.kept(None) == {}
    multiturn.keep(None, "device", 8, multiturn.Ran(1.0, 0.0))
    points = {("device", 8): multiturn.Ran(1000.5, 0.88), ("files", 256): multiturn.Ran(2000.0, 0.0)}
    for (kind, count), ran in points.items():
        multiturn.keep(path, kind, count, ran)
    assert multiturn.kept(path) == points
