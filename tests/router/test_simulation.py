"""The simulator: the same for a seed, whole in its sums, and able to tell policies apart."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.anchors import anchors
from benchmarks.simulate.hardware import BLOCK, HARDWARE
from benchmarks.simulate.run import Figures, Setup, Simulation
from benchmarks.simulate.workload import (
    Request,
    at_load,
    copies_of,
    from_trace,
    generated,
    in_turn,
    infinite_hits,
    share,
)
from forebay.scheduler.policies import POLICIES

REQUESTS = generated(250, 3)
H100 = HARDWARE["h100"]


def run(policy: str, requests: Sequence[Request] = REQUESTS, load: float = 0.7, **more: object) -> Figures:
    scaled = at_load(requests, H100, 8, load)
    return Simulation(Setup(H100, 8, policy, **more), scaled).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_answered_and_every_token_counted(policy: str) -> None:
    figures = run(policy)
    assert len(figures.ttft) == len(REQUESTS) and figures.rejected == 0
    assert figures.tokens == sum(request.tokens for request in REQUESTS)
    assert figures.hit_tokens <= sum(infinite_hits(REQUESTS)) and min(figures.ttft) > 0
    assert figures.ttft == run(policy).ttft, "a seed decides it all"


def test_the_estimate_is_sooner_than_every_other_policy_and_herds_nobody() -> None:
    requests = generated(700, 5)
    found = {policy: run(policy, requests, load=0.85) for policy in POLICIES}
    p90 = {policy: figures.quantile(0.9) for policy, figures in found.items()}
    assert min(p90, key=p90.__getitem__) == "ttft", p90
    assert not any(figures.rejected for figures in found.values())
    assert found["longest-prefix"].imbalance == pytest.approx(8.0)
    assert found["ttft"].imbalance < 1.5, "of so few requests, each of which may be long"


def test_without_stores_hits_depend_on_routing_and_with_one_they_hardly_do() -> None:
    infinite = share(infinite_hits(REQUESTS), REQUESTS)
    alone, shared = (run("round-robin", load=0.3, stores=stores) for stores in (False, True))
    assert alone.hit_tokens / alone.tokens < 0.8 * infinite
    assert shared.hit_tokens / shared.tokens > 0.9 * infinite


def test_a_dead_workers_requests_are_answered_by_others() -> None:
    figures = run("ttft", load=0.95, kill=3)
    assert figures.resent > 0 and len(figures.ttft) == len(REQUESTS)


def test_full_workers_reject_and_it_is_counted() -> None:
    figures = run("round-robin", load=3.0, max_waiting=2)
    assert figures.rejected > 0 and len(figures.ttft) + figures.rejected == len(REQUESTS)


def test_belief_falls_behind_when_events_are_late() -> None:
    late = Simulation(Setup(_late(30.0), 8, "least-load", predict_s=0.0), at_load(REQUESTS, H100, 8, 0.7)).run()
    soon = Simulation(Setup(_late(0.0), 8, "least-load", predict_s=0.0), at_load(REQUESTS, H100, 8, 0.7)).run()
    assert late.believed_tokens < 0.9 * late.hit_tokens
    assert soon.error_tokens < late.error_tokens


def _late(seconds: float) -> object:
    from dataclasses import replace

    return replace(H100, visible_s=seconds)


def test_copies_share_nothing() -> None:
    copied = copies_of(REQUESTS, 3, 1)
    assert len(copied) == 3 * len(REQUESTS)
    assert share(infinite_hits(copied), copied) == pytest.approx(share(infinite_hits(REQUESTS), REQUESTS))


def test_a_trace_is_read_and_the_command_prints_what_came_of_it(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"  # type: ignore[operator]
    rows = [
        {"timestamp": 1000 * n, "input_length": 3 * BLOCK, "output_length": 2, "hash_ids": [0, n // 2, 100 + n]}
        for n in range(40)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    requests = from_trace(path)
    assert requests[3].blocks[:2] == requests[2].blocks[:2] and len(requests) == 40
    assert [measure.ok for measure in anchors(requests, False)] == [None, None, None]
    assert main(["--trace", str(path), "--workers", "2", "--loads", "70", "--policies", "ttft", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert told[-1]["requests"] == 40 and told[-1]["setup"]["policy"] == "ttft"
    assert main(["--policies", "none"]) == 2


def test_a_turn_waits_for_the_answer_before_it_and_a_new_conversation_for_nobody() -> None:
    first = Request(0.0, 4 * BLOCK, 1000, (0, 1, 2, 3))
    second = Request(0.1, 6 * BLOCK, 1, (0, 1, 2, 4, 5, 6))
    other = Request(0.2, 3 * BLOCK, 1, (0, 7, 8))
    made = in_turn([second, other, first])
    assert [(request.number, request.after) for request in made] == [(0, -1), (1, 0), (2, -1)]
    causal, open_loop = (Simulation(Setup(H100, 1, "ttft", in_turn=turns), made).run() for turns in (True, False))
    assert (causal.held, open_loop.held) == (1, 0)
    assert causal.hit_tokens == 3 * BLOCK + BLOCK, "the turn finds what the first one left, the other the first block"
    assert causal.utilisation < 0.05 < open_loop.utilisation, "its last request was sent after 12 s, not after 0.2 s"
    assert causal.quantile(1.0) < 1.0, "waiting for one's own answer is no time to first token"


def test_copies_keep_their_own_turns() -> None:
    copied = {request.number: request for request in copies_of(REQUESTS, 3, 1)}
    assert len(copied) == 3 * len(REQUESTS)
    followers = [request for request in copied.values() if request.after >= 0]
    assert followers and all(copied[request.after].blocks[1] == request.blocks[1] for request in followers)
    assert all(copied[request.after].at <= request.at for request in followers)


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_a_load_is_what_devices_are_busy_for(load: float) -> None:
    requests = generated(700, 9)
    spread = [
        Request(10.0 * number, one.tokens, one.output, tuple(10_000 * number + block for block in one.blocks))
        for number, one in enumerate(requests)
    ]
    figures = run("ttft", in_turn(spread), load)
    assert figures.utilisation == pytest.approx(load, rel=0.05)
