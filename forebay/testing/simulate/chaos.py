"""What goes wrong, and when: processes die and stop, networks break, memories rot. After `heal` nothing does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from forebay.kvstore.header import MAGIC, SlotState, slot_state
from forebay.kvstore.layout import ALIGNMENT
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.net import Weather
from forebay.testing.simulate.node import Node

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World

EVENTS = (
    "connection_reset", "worker_killed", "worker_stopped", "daemon_killed", "daemon_killed_writing",
    "daemon_restarted", "daemon_stopped", "memory_rot", "tier_hung", "tier_killed", "disk_rot", "power_loss",
    "bucket_deletes",
)  # fmt: skip
EVERY_S = 0.08


class Chaos:
    """Draws one thing after the other. Runs outside of every simulated process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.plan.seed}/chaos")
        self._events = [event for event in EVENTS if world.plan.has(event)]
        self._stopped: list[Process] = []

    def begin(self) -> None:
        """From now on."""
        plan, rng = self._world.plan, self._rng
        self._world.net.weather = Weather(
            slow_share=0.1 if plan.has("network_slow") else 0.0,
            slice_share=0.3 if plan.has("network_sliced") else 0.0,
            buffer_bytes=rng.choice((600, 3000)) if plan.has("network_small_buffers") else 1 << 18,
        )
        if self._events:
            self._next()

    def _next(self) -> None:
        wait = self._rng.expovariate(self._world.plan.rate / EVERY_S)
        self._world.loop.call_later(wait, self._strike, context=self._world.kernel)

    def _strike(self) -> None:
        if self._world.healthy:
            return
        event = self._rng.choice(self._events)
        if getattr(self, f"_{event}")():
            self._world.fault(event)
        self._next()

    def heal(self) -> None:
        """Everything works again, and who was stopped goes on."""
        world = self._world
        world.healthy, world.healed_at = True, world.loop.time()
        world.net.weather = Weather()
        for process in self._stopped:
            process.go_on()
        for node in world.nodes:
            daemon = node.running
            if daemon is None:
                node.start()
            else:
                daemon.pool.die_in = 0
        for worker in world.workers:
            if not worker.process.alive:
                worker.start()

    def _later(self, low: float, high: float, callback: object, *args: object) -> None:
        self._world.loop.call_later(self._rng.uniform(low, high), callback, *args, context=self._world.kernel)  # type: ignore[arg-type]

    def _stop(self, process: Process, seconds: float) -> bool:
        if process.stopped or not process.alive:
            return False
        process.stop()
        self._stopped.append(process)
        self._later(0.0, seconds, process.go_on)
        return True

    # --- events ----------------------------------------------------------------------------------------

    def _connection_reset(self) -> bool:
        pairs = self._world.net.open_pairs()
        clients = [pair for pair in pairs if any(end.process.node < 0 and end.process.parent is None for end in pair)]
        if not clients:
            return False
        self._world.net.reset(self._rng.choice(clients))
        return True

    def _worker_killed(self) -> bool:
        worker = self._rng.choice(self._world.workers)
        if not worker.process.alive:
            return False
        worker.process.kill()

        def again() -> None:
            if not worker.process.alive and not self._world.closing:
                worker.start()

        self._later(0.0, 0.2, again)
        return True

    def _worker_stopped(self) -> bool:
        return self._stop(self._rng.choice(self._world.workers).process, 1.0)

    def _node(self) -> Node:
        return self._rng.choice(self._world.nodes)

    def start_again(self, node: Node) -> None:
        """Whoever watches the node's daemon starts another soon."""

        def again() -> None:
            if node.running is None and not self._world.closing:
                if self._may_rot(node) and self._rot_files(node):
                    self._world.fault("pool_rot_while_down")
                node.start()

        self._later(0.0, 0.2, again)

    def _daemon_killed(self) -> bool:
        node = self._node()
        if node.running is None:
            return False
        node.kill()
        self.start_again(node)
        return True

    def _daemon_killed_writing(self) -> bool:
        """It dies within one of its next writes to the pool."""
        node = self._node()
        if node.running is None or node.running.pool.die_in:
            return False
        daemon = node.running
        daemon.pool.die_in = self._rng.randint(1, 12)
        daemon.pool.cut_short = lambda length: self._rng.choice((0, 8, 40, length // 2, length))
        daemon.process.at_exit.append(lambda: self.start_again(node))
        return True

    def _daemon_restarted(self) -> bool:
        node = self._node()
        if node.running is None or not node.running.ready:
            return False
        node.stop_cleanly()
        node.running.process.at_exit.append(lambda: self.start_again(node))
        return True

    def _daemon_stopped(self) -> bool:
        node = self._node()
        return node.running is not None and self._stop(node.running.process, 0.8)

    def _tier_hung(self) -> bool:
        living = self._world.tiers.living()
        return bool(living) and self._stop(self._rng.choice(living).process, 1.5)

    def _tier_killed(self) -> bool:
        living = self._world.tiers.living()
        if not living:
            return False
        self._rng.choice(living).kill()
        return True

    def _disk_rot(self) -> bool:
        devices = self._world.tiers.devices()
        return bool(devices) and self._rng.choice(devices)[2].rot(self._rng)

    def _power_loss(self) -> bool:
        """The disk's; its tier's process dies with it."""
        devices = self._world.tiers.devices()
        for index, kind, device in devices:
            for child in self._world.tiers.living():
                if child.node.index == index and child.tier == kind:
                    child.process.kill()
            device.lose_power(self._rng)
        return bool(devices)

    def _bucket_deletes(self) -> bool:
        bucket = self._world.tiers.bucket
        if not bucket.objects:
            return False
        bucket.delete(self._rng.choice(list(bucket.objects)))
        return True

    # --- rot -------------------------------------------------------------------------------------------

    def _memory_rot(self) -> bool:
        """A bit of a committed chunk flips while the daemon runs: in its payload, or in its header."""
        daemon = self._node().running
        if daemon is None or daemon.core is None:
            return False
        held = [entry for entry in daemon.core.table if entry.state is SlotState.COMMITTED]
        if not held:
            return False
        entry = self._rng.choice(held)
        view = daemon.pool.views[entry.slot.extent]
        payload = entry.payload_offset + self._rng.randrange(entry.payload_length)
        header = entry.slot.offset + self._rng.randrange(24, 300)
        view[self._rng.choice((payload, payload, header))] ^= 1 << self._rng.randrange(8)
        self._world.rotted = True
        return True

    def _may_rot(self, node: Node) -> bool:
        """Nobody reads through an old mapping: such a reader has its leases from before, and no second look."""
        world = self._world
        reading = any(w.node is node and (w.reading or w.client.connected) for w in world.workers)
        return world.plan.has("pool_rot_while_down") and not world.healthy and not reading

    def _rot_files(self, node: Node) -> bool:
        """Bits of committed chunks flip while no daemon is there to see."""
        rotten = 0
        for file in sorted(node.folder.glob("extent-*")):
            data = bytearray(file.read_bytes())
            for at in range(ALIGNMENT, len(data), ALIGNMENT):
                there = data[at : at + 8] == MAGIC and slot_state(bytes(data[at : at + 64])) is SlotState.COMMITTED
                if there and self._rng.random() < 0.6:
                    # Behind the fields that change in place: those have no checksum and no need of one.
                    payload = ALIGNMENT + self._rng.randrange(256)
                    where = at + self._rng.choice((self._rng.randrange(24, 300), payload, payload))
                    data[where] ^= 1 << self._rng.randrange(8)
                    rotten += 1
            with open(file, "r+b") as handle:
                handle.write(data)
        return rotten > 0
