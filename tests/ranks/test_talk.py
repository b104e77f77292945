"""What ranks tell each other arrives whole or not at all; a rank that is gone, or silent, is noticed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.errors import ConfigError, NotWritable
from forebay.kernels.batch import Batch, pack_batch
from forebay.workers.ranks.channel import Channel
from forebay.workers.ranks.crew import Crew, _Other
from forebay.workers.ranks.errors import RankLost
from forebay.workers.ranks.group import rendezvous
from forebay.workers.ranks.messages import (
    ANSWERS,
    FROM_FOLLOWER,
    ORDERS,
    TO_FOLLOWER,
    Detach,
    Done,
    Load,
    Order,
    Place,
    Step,
)
from forebay.workers.ranks.network import LOOPBACK, ranks_interface
from forebay.workers.ranks.progress import Progress
from forebay.workers.ranks.steps import pack_step, unpack_step

CPU = torch.device("cpu")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


Ends = tuple[socket.socket, socket.socket]


def rank0(end: socket.socket) -> Channel[Order, Done]:
    return Channel(end, ORDERS, ANSWERS, "rank 1")


def rank1(end: socket.socket) -> Channel[Done, Order]:
    return Channel(end, ANSWERS, ORDERS, "rank 0")


# --- channels ------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order(ends: Ends) -> None:
    left, right = rank0(ends[0]), rank1(ends[1])
    left.send(Detach())
    left.send(Detach())
    assert right.receive() == right.receive() == Detach()
    right.send(Done("no", [1, 5]))
    assert left.receive(1) == Done("no", [1, 5])


def test_a_closed_end_is_a_lost_rank(ends: Ends) -> None:
    left = rank0(ends[0])
    ends[1].close()
    with pytest.raises(RankLost, match="rank 1 is gone"):
        left.receive(5)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        left.send(Detach())


def test_a_silent_rank_is_lost(ends: Ends) -> None:
    with pytest.raises(RankLost, match=r"rank 1 has said nothing for 0\.05 s"):
        rank0(ends[0]).receive(0.05)


def test_a_rank_that_does_not_listen_is_lost(ends: Ends) -> None:
    left, order = rank0(ends[0]), Load(0, 0, Place(0, 0, 0), list(range(100_000)))
    with pytest.raises(RankLost, match=r"rank 1 has taken nothing for 0\.05 s"):
        left.send(order, 0.05)


def test_a_rank_that_dies_in_the_middle_of_a_word_is_lost(ends: Ends) -> None:
    ends[1].sendall(ANSWERS.encode(Done())[:-1])
    ends[1].close()
    with pytest.raises(RankLost):
        rank0(ends[0]).receive(5)


@pytest.mark.parametrize("at", [0, 5, 9, -1])
def test_a_damaged_word_is_none(ends: Ends, at: int) -> None:
    data = bytearray(ANSWERS.encode(Done("x" * 20)))
    data[at] ^= 0x10
    ends[1].sendall(data)
    ends[1].close()
    with pytest.raises(RankLost):
        rank0(ends[0]).receive(5)


# --- steps ---------------------------------------------------------------------------------------------------


def same(left: Batch, right: Batch) -> bool:
    tensors = [(left.token_ids, right.token_ids), (left.positions, right.positions)]
    tensors.append((left.logits_rows, right.logits_rows))
    for name in left.groups.keys() | right.groups.keys():
        one, other = left.groups[name], right.groups[name]
        tensors += [(one.block_tables, other.block_tables), (one.slots, other.slots)]
    return left.spans == right.spans and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in tensors)


@pytest.mark.parametrize("rows", [None, [0, 2], []])
def test_a_step_is_the_same_batch_on_every_rank(rows: list[int] | None) -> None:
    tables = {"full": [[4, 9, 1], [7]], "window": [[-1, 2, 3], [0]]}
    batch = pack_batch([([5, 6, 7], 40), ([8], 3)], tables, logits_rows=rows)
    message = TO_FOLLOWER.decode(TO_FOLLOWER.encode(pack_step(batch))[12:])
    assert isinstance(message, Step)
    found = unpack_step(message, CPU)
    found.check()
    assert same(found, batch)


def test_copies_wait_for_the_step_that_they_follow() -> None:
    progress, order = Progress(), []

    def copy() -> None:
        progress.wait(2, 20)
        order.append("copied")

    thread = threading.Thread(target=copy)
    thread.start()
    progress.advance()
    thread.join(0.05)
    order.append("second step")
    progress.advance()
    thread.join(20)
    assert order == ["second step", "copied"] and progress.steps == 2
    with pytest.raises(RankLost, match="step 3 isn't computed"):
        progress.wait(3, 0.01)


# --- a crew --------------------------------------------------------------------------------------------------


class FakeProcess:
    """A process that lives until it is told to end."""

    pid = 4711

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass


def crew_of(size: int, patience_s: float = 20.0) -> tuple[Crew, list[socket.socket]]:
    """Rank 0's view of ranks whose `moves` ends are returned."""
    crew, theirs = Crew(size, patience_s), []
    for rank in range(1, size):
        (steps, _), (moves, other) = socket.socketpair(), socket.socketpair()
        channel = Channel(steps, TO_FOLLOWER, FROM_FOLLOWER, f"rank {rank}")
        crew._others.append(_Other(rank, FakeProcess(), channel, Channel(moves, ORDERS, ANSWERS, f"rank {rank}")))  # type: ignore[arg-type]
        theirs.append(other)
    return crew, theirs


def test_an_order_ends_when_every_rank_has_answered() -> None:
    crew, theirs = crew_of(3)
    done: list[str] = []

    def follow(rank: int, end: socket.socket) -> None:
        channel = rank1(end)
        channel.receive()
        time.sleep(0.01 * rank)
        done.append(f"rank {rank}")
        channel.send(Done(failed=f"{rank}"))

    threads = [threading.Thread(target=follow, args=(rank, end)) for rank, end in enumerate(theirs, 1)]
    for thread in threads:
        thread.start()
    answers = crew.order(Detach(), meanwhile=lambda: done.append("rank 0"))
    assert sorted(done) == ["rank 0", "rank 1", "rank 2"] and [a.failed for a in answers] == ["1", "2"]
    for thread in threads:
        thread.join(20)


def test_an_order_to_some_leaves_the_others_alone() -> None:
    crew, theirs = crew_of(3)
    theirs[1].sendall(ANSWERS.encode(Done()))
    crew.order(Detach(), to=(0, 2))
    theirs[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs[0].recv(1)


def test_what_fails_here_waits_for_the_others_all_the_same() -> None:
    crew, theirs = crew_of(2)
    theirs[0].sendall(ANSWERS.encode(Done()) + ANSWERS.encode(Done("second")))
    with pytest.raises(ZeroDivisionError):
        crew.order(Detach(), meanwhile=lambda: 1 / 0)
    assert crew.order(Detach()) == [Done("second")], "its answer was taken, and isn't mistaken for the next"


def test_a_rank_that_does_not_answer_ends_everything() -> None:
    crew, theirs = crew_of(2, patience_s=0.05)
    with pytest.raises(RankLost, match=r"has said nothing for 0\.05 s"):
        crew.order(Detach())
    theirs[0].sendall(ANSWERS.encode(Done()))
    with pytest.raises(RankLost, match="has said nothing"):
        crew.order(Detach())
    with pytest.raises(RankLost, match="has said nothing"):
        crew.step(pack_step(pack_batch([([1], 0)], {"full": [[0]]})))
    assert "rank 1" in crew.lost


# --- where they meet -----------------------------------------------------------------------------------------


def test_the_place_to_meet_is_private_and_goes(tmp_path: Path) -> None:
    with rendezvous(tmp_path / "w.sock") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700 and folder.parent == tmp_path
        (folder / "ranks").write_text("where I listen")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_worker_left_is_not_met(tmp_path: Path) -> None:
    (tmp_path / "w.sock.ranks").mkdir()
    (tmp_path / "w.sock.ranks" / "ranks").write_text("where I listened")
    with rendezvous(tmp_path / "w.sock") as folder:
        assert list(folder.iterdir()) == []


def test_a_link_is_no_place_to_meet(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "w.sock.ranks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotWritable, match="is no directory"), rendezvous(tmp_path / "w.sock"):
        pass
    assert (tmp_path / "elsewhere").is_dir()


# --- over which network --------------------------------------------------------------------------------------


def test_ranks_talk_over_loopback() -> None:
    assert ranks_interface(None, {}) == LOOPBACK
    assert ranks_interface(None, {"GLOO_SOCKET_IFNAME": LOOPBACK}) == LOOPBACK


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_off_loopback_they_are_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is eth7.* unset it, or give --trusted-network eth7"):
        ranks_interface(None, {variable: "eth7"})
    with pytest.raises(ConfigError, match="unset it, or give --trusted-network eth7"):
        ranks_interface(LOOPBACK, {variable: "eth7"})


def test_a_trusted_network_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"--trusted-network eth7: there is no such interface; there are .*lo"):
        ranks_interface("eth7", {})


def test_an_interface_that_somebody_vouches_for_is_used() -> None:
    names = [name for _, name in socket.if_nameindex() if name != LOOPBACK]
    if not names:
        pytest.skip("this machine has no other interface")
    assert ranks_interface(names[0], {"GLOO_SOCKET_IFNAME": names[0]}) == names[0]
