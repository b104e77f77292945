"""The process of a rank other than 0: loads its part, then computes whatever rank 0 computes.

    main thread   steps, as they come          `copies` thread   orders to copy, as they come

It ends with rank 0, at once and whatever it is doing: it holds nothing that anybody needs. Ctrl-C and SIGTERM are for
rank 0, which still stores what it has, with this rank's help.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from forebay.errors import ForebayError
from forebay.kvstore.identity import decode_namespace
from forebay.models.base import CausalLM
from forebay.models.loading import load_model
from forebay.workers.hot.following import FollowingBook, done
from forebay.workers.ranks.channel import Channel
from forebay.workers.ranks.errors import RankLost
from forebay.workers.ranks.group import ProcessRanks
from forebay.workers.ranks.messages import (
    ANSWERS,
    FROM_FOLLOWER,
    ORDERS,
    TO_FOLLOWER,
    Done,
    FromFollower,
    Loaded,
    Meet,
    Order,
    Pools,
    Start,
    Step,
    ToFollower,
)
from forebay.workers.ranks.moving import Follower, rank_shard
from forebay.workers.ranks.progress import Progress
from forebay.workers.ranks.steps import unpack_step

RANK0 = "rank 0"

log = logging.getLogger(__name__)


def run_follower(steps_fd: int, moves_fd: int) -> int:
    """Serve until rank 0 ends; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    steps: Channel[FromFollower, ToFollower] = Channel(_socket(steps_fd), FROM_FOLLOWER, TO_FOLLOWER, RANK0)
    moves: Channel[Done, Order] = Channel(_socket(moves_fd), ANSWERS, ORDERS, RANK0)
    start = steps.receive()
    assert isinstance(start, Start), start
    logging.basicConfig(
        level=os.environ.get("FOREBAY_LOG", "INFO").upper(), stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s rank {start.rank}: %(name)s: %(message)s",
    )  # fmt: skip
    try:
        _serve(start, steps, moves)
    except RankLost as error:
        log.debug("this rank ends: %s", error)
        return 0
    except ForebayError as error:
        print(f"forebay: rank {start.rank}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _socket(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def _serve(start: Start, steps: Channel[FromFollower, ToFollower], moves: Channel[Done, Order]) -> None:
    """Ends by RankLost, when rank 0 closes its ends."""
    torch.set_num_threads(start.threads)
    ranks, device = ProcessRanks(start.rank, start.parallel.size, start.parallel), torch.device(start.device)
    dtype: torch.dtype = getattr(torch, start.dtype)
    kv_dtype: torch.dtype | None = None if start.kv_dtype is None else getattr(torch, start.kv_dtype)
    model = load_model(
        Path(start.directory), dtype=dtype, device=device, ranks=ranks, index_keys=start.index_keys,
        kv_dtype=kv_dtype,
    )
    steps.send(Loaded())
    _expect(steps, Meet)
    ranks.meet(Path(start.rendezvous), device, start.patience_s)
    asked = _expect(steps, Pools)
    pools = model.new_pools(asked.blocks)
    for pool in pools.values():
        pool.fill_(0)  # every page is touched once, now rather than on the way to the first token
    progress, namespace = Progress(), decode_namespace(asked.namespace)
    shard = rank_shard(namespace, start.rank, start.parallel)
    follower = Follower(namespace, asked.label, shard, pools, progress, start.patience_s)
    hot = None if asked.hot is None else FollowingBook(asked.hot, lambda: follower.mapped, device)
    threading.Thread(target=_copy, args=(follower, moves), name="copies", daemon=True).start()
    steps.send(Loaded())
    _compute(model, pools, steps, progress, hot)


def _expect(steps: Channel[FromFollower, ToFollower], kind: type[Pools] | type[Meet]) -> Pools:
    message = steps.receive()
    assert isinstance(message, kind), message
    return message  # type: ignore[return-value]


def _copy(follower: Follower, moves: Channel[Done, Order]) -> None:
    try:
        follower.run(moves)
    except RankLost:
        return  # rank 0 ends; the thread that computes hears it too
    except BaseException:
        log.exception("this rank can't copy any more; its worker ends")
        os._exit(1)  # the main thread may wait in a collective for ever


def _compute(
    model: CausalLM, pools: dict[str, torch.Tensor], steps: Channel[FromFollower, ToFollower], progress: Progress,
    hot: FollowingBook | None,
) -> None:  # fmt: skip
    while True:
        step = steps.receive()
        assert isinstance(step, Step), step
        resolver = None if hot is None or step.hot is None else hot.begin(step.hot, pools)
        with torch.inference_mode():
            model.forward(replace(unpack_step(step, model.device), resolver=resolver), pools)
        answer = None if resolver is None else done(resolver)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        progress.advance()
        if answer is not None:
            steps.send(answer)
