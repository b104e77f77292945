"""SIMULATED: how fast ranks answer long prompts, with the cache copied to all of them and with positions shared out.

    python -m benchmarks.simulate.context [--ranks 8] [--context 67000] [--new 753] [--output 400] [--json]

A closed loop of so many conversations, each of which sends its next turn as soon as it has an answer. What is assumed:

    room       `forebay plan`'s arithmetic: a rank's memory, less weights and reserve, over what a request takes there
    a step     bytes read from memory (weights, the experts that its tokens choose, every running request's keys on that
               rank), then its collectives: for each a latency, and their bytes over the link
    a prompt   the new tokens' products, at half of the peak, in the time of all
    reload     where not all conversations fit, a turn's prefix comes from the store, beside everything else: turns are
               no more than the ranks' links to the host carry, each rank loading what it has of a prefix

Collectives and bytes are those that the code counts (`forebay.models.traffic`); the sizes are DeepSeek-V3's on eight
H200. None of this has run on devices; published for another model and device (Kimi K2.6, B200) is a factor of 3.27.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.report import parser
from forebay.cli.tables import table
from forebay.models.base import KVGroup, ModelInfo
from forebay.models.capacity import Budget, Ranks, footprint
from forebay.models.traffic import Backend, Exchange

ITEM = 2
PUBLISHED = 3.27


@dataclass(frozen=True)
class Model:
    """What a step reads and sends. Weights in bytes; `choose` experts of `experts` a token and layer."""

    info: ModelInfo
    heads: int
    value: int
    always: float
    experts_bytes: float
    experts: int
    choose: int
    active_parameters: float

    def weights(self, tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads, of all ranks together."""
        touched = 1 - (1 - self.choose / self.experts) ** tokens
        return self.always + self.experts_bytes * touched


DEEPSEEK_V3 = Model(
    info=ModelInfo("deepseek_v3", 129_280, 7168, 61, 163_840, (KVGroup("latent", "latent", tuple(range(61)), 1, 576),)),
    heads=128, value=512, always=17e9, experts_bytes=656e9, experts=256, choose=8, active_parameters=37e9,
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One of them. Bytes, bytes a second, seconds, operations a second."""

    memory: float = 141e9
    memory_rate: float = 4.8e12
    link: float = 450e9
    host_link: float = 50e9
    latency: float = 10e-6
    peak: float = 1.98e15


@dataclass(frozen=True)
class Workload:
    """Of a turn: tokens behind it, new ones, and those of its answer."""

    context: int
    new: int
    output: int


@dataclass(frozen=True)
class Point:
    """What comes of so many conversations: how many run at a time, tokens a second of each device, what limits."""

    conversations: int
    running: int
    tokens_s: float
    step_ms: float
    limit: str


@dataclass(frozen=True)
class Side:
    """One way to use the ranks."""

    model: Model
    device: Device
    ranks: int
    backend: Backend | None

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.ranks, 1 if self.backend is None else self.ranks)

    def room(self, load: Workload) -> int:
        """Requests that fit at a time."""
        weights = (self.model.always + self.model.experts_bytes) / self.ranks
        budget = Budget(int(self.device.memory), int(weights), 4 << 30)
        return budget.kv // self._taken(load)

    def _taken(self, load: Workload) -> int:
        return footprint(self.model.info, self._ranks, ITEM, load.context + load.new + load.output).rank

    def exchange(self) -> Exchange | None:
        """What attention sends for a token in a layer."""
        if self.backend is None:
            return None
        key = self.model.info.kv_groups[0].head_dim
        return Exchange(self.ranks, self.model.heads // self.ranks, key, self.model.value, ITEM, 4, self.backend)

    def step_s(self, running: int, load: Workload) -> float:
        """One token of each of those that run."""
        device, layers = self.device, self.model.info.num_layers
        read = self.model.weights(running) / self.ranks + running * self._taken(load)
        # Two sums a layer, each of them there and back.
        calls, sent = 2.0, 2.0 * 2 * self.model.info.hidden_size * ITEM * running
        exchange = self.exchange()
        if exchange is not None:
            calls, sent = calls + exchange.collectives, sent + exchange.bytes * running
        return read / device.memory_rate + layers * (calls * device.latency + sent / device.link)

    def prompt_s(self, load: Workload) -> float:
        """All new tokens of one turn."""
        return 2 * self.model.active_parameters * load.new / (self.ranks * self.device.peak / 2)

    def point(self, conversations: int, load: Workload) -> Point:
        """Steady state of so many conversations."""
        room = self.room(load)
        running = min(conversations, room)
        step = self.step_s(running, load)
        turns_s = running / (load.output * step + running * self.prompt_s(load))
        limit = "steps"
        if conversations > room:
            limit = "room"
            loads_s = self.device.host_link / self._taken(load)
            if loads_s < turns_s:
                turns_s, limit = loads_s, "reload"
        return Point(conversations, running, turns_s * load.output / self.ranks, 1e3 * step, limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    made = parser(__doc__ or "")
    made.add_argument("--ranks", type=int, default=8)
    made.add_argument("--context", type=int, default=67_000, help="tokens behind a turn")
    made.add_argument("--new", type=int, default=753, help="tokens of a turn")
    made.add_argument("--output", type=int, default=400, help="tokens of its answer")
    given = made.parse_args(argv)
    load = Workload(given.context, given.new, given.output)
    ways: tuple[Backend | None, ...] = (None, "ag_rs", "a2a")
    sides = {way or "plain": Side(DEEPSEEK_V3, Device(), given.ranks, way) for way in ways}
    counts = [1, 4, 8, 16, 32, 64, 128, 256, 512]
    points = {name: [side.point(count, load) for count in counts] for name, side in sides.items()}
    if given.json:
        for name, row in points.items():
            print("\n".join(json.dumps({"side": name, "simulated": True} | asdict(point)) for point in row))
        return 0
    print("SIMULATED, by the model of cost in this module's head; nothing here was measured on devices\n")
    for name, side in sides.items():
        exchange = side.exchange()
        sends = f"; {exchange.bytes:,} bytes, {exchange.collectives} collectives a layer" if exchange else ""
        print(f"{name}: room for {side.room(load)} requests{sends}")
    head = ("conversations", *(f"{name}: {what}" for name in sides for what in ("tok/s a device", "step ms", "limit")))
    rows = [
        [str(count), *(text for name in sides for text in _texts(points[name][index]))]
        for index, count in enumerate(counts)
    ]
    print("\n" + table(head, rows, right=range(len(head))))
    best = {name: max(point.tokens_s for point in row) for name, row in points.items()}
    for name in ("ag_rs", "a2a"):
        print(f"best {name}: {best[name] / best['plain']:.2f} times plain (published elsewhere: {PUBLISHED})")
    return 0


def _texts(point: Point) -> tuple[str, str, str]:
    return f"{point.tokens_s:,.0f}", f"{point.step_ms:.1f}", point.limit


if __name__ == "__main__":
    sys.exit(main())
