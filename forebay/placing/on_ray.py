"""Ray's part: an actor on each host, watched once a second. What goes through Ray is a `HostSpec` and a `Place` a call.

    a node comes         the first vacant slot is started on it
    an actor dies        Ray starts it again there; its processes end with it, and the new one starts them anew
    a node goes          its slot is vacant, the router is told, another node takes it
    forebay serve ends   its actor starts it again at the next look
"""

from __future__ import annotations

import logging
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.placing.host import Host
from forebay.placing.routing import RouterProcess
from forebay.placing.slots import Slots
from forebay.placing.spec import SERVER, HostSpec, Place
from forebay.tiers.p2p.keys import KeyPair

log = logging.getLogger(__name__)

LOOK_S = 1.0
ANSWER_S = 10.0
STOP_S = 90.0


@dataclass(frozen=True)
class RayConfig:
    """`address` is a Ray cluster's ("auto": the one that this machine belongs to). Up to `hosts` of its nodes serve,
    each with `cpus` and `gpus` of Ray's reserved. `pair` is the router's key pair, `worker_key` its API key (None:
    nobody asks for one), `port` where it serves, on loopback."""

    address: str
    hosts: int
    spec: HostSpec
    pair: KeyPair
    port: int
    worker_key: str | None = None
    cpus: int = 1
    gpus: int = 0


@dataclass
class Placed:
    """One slot's actor, and what it said last."""

    actor: Any
    place: Place | None = None
    asked: Any = None


@dataclass
class RayCluster:
    """Keeps slots filled. `tell` gets lines for people."""

    config: RayConfig
    router: RouterProcess
    tell: Callable[[str], None]
    slots: Slots = field(init=False)
    placed: dict[int, Placed] = field(default_factory=dict)
    _addresses: dict[str, str] = field(default_factory=dict)
    _run: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        self.slots = Slots(self.config.hosts)

    def look(self) -> None:
        """Once: nodes, actors, router. Blocks for as long as the slowest answer, `ANSWER_S` at most."""
        change = self.slots.update(self._alive())
        for slot in change.left:
            self._drop(slot, "its node is gone")
        for slot, node in change.came.items():
            self._place(slot, node)
        self._ask()
        places = {slot: one.place for slot, one in self.placed.items() if one.place is not None and one.place.running}
        self.router.look(places)

    @property
    def ready(self) -> int:
        """Hosts whose front end has a worker."""
        return sum(one.place is not None and one.place.ready for one in self.placed.values())

    def stop(self) -> None:
        """End all hosts, in order, and the router. Blocks until they are ended, or for `STOP_S`."""
        import ray

        self.router.stop()
        asked = [one.actor.stop.remote() for one in self.placed.values()]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=STOP_S)
        for slot in list(self.placed):
            self._drop(slot, None)

    # --- inside ------------------------------------------------------------------------------------------

    def _alive(self) -> list[str]:
        """Nodes with the resources that a host wants, those that serve first."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"] and self._able(node["Resources"])]
        self._addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        for address in self._addresses.values():
            if self.config.spec.api_keys is None and not address.startswith("127."):
                raise ConfigError(
                    f"--ray: a host of the cluster is {address}, which others can reach; that needs --api-keys FILE"
                )
        return sorted(self._addresses)

    def _able(self, resources: dict[str, float]) -> bool:
        return resources.get("CPU", 0) >= self.config.cpus and resources.get("GPU", 0) >= self.config.gpus

    def _place(self, slot: int, node: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        address = self._addresses[node]
        options = {
            "num_cpus": self.config.cpus, "num_gpus": self.config.gpus, "max_restarts": -1, "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }  # fmt: skip
        actor = ray.remote(Host).options(**options).remote(self.config.spec, address, f"{self._run}-h{slot}")
        self.placed[slot] = Placed(actor)
        self.tell(f"host h{slot} is placed at {address}")

    def _drop(self, slot: int, why: str | None) -> None:
        import ray

        ray.kill(self.placed.pop(slot).actor)
        if why is not None:
            self.tell(f"host h{slot} is lost: {why}")

    def _ask(self) -> None:
        """What each actor says; one that doesn't answer (it is being started, or started again) serves nowhere."""
        import ray
        from ray.exceptions import RayError

        for one in self.placed.values():
            one.asked = one.asked or one.actor.look.remote()
        waiting = [one.asked for one in self.placed.values()]
        done = set(ray.wait(waiting, num_returns=len(waiting), timeout=ANSWER_S)[0]) if waiting else set()
        for slot, one in self.placed.items():
            if one.asked not in done:
                continue
            before = one.place
            try:
                one.place = ray.get(one.asked)
            except RayError as error:
                one.place = None
                log.warning("host h%d doesn't answer: %s", slot, str(error).splitlines()[0])
            one.asked = None
            self._told(slot, before, one.place)

    def _told(self, slot: int, before: Place | None, now: Place | None) -> None:
        if now is not None and now.trouble and (before is None or before.trouble != now.trouble):
            self.tell(f"host h{slot}: {now.trouble}")
        if now is not None and now.ready and not (before is not None and before.ready):
            self.tell(f"host h{slot} serves at {now.url}")
        if before is not None and before.ready and not (now is not None and now.ready):
            self.tell(f"host h{slot} serves no more" + ("" if now is None else "; it is started again"))


def serve_on_ray(config: RayConfig, tell: Callable[[str], None], ready: Callable[[int], None]) -> int:
    """Serve until SIGTERM or SIGINT; `ready` hears once that the first host is there. Returns an exit code.

    Raises ConfigError if Ray isn't installed, or no cluster is there.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs Ray: pip install 'forebay[ray]' brings it") from error
    try:
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.WARNING, namespace="forebay")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray {config.address}: no Ray cluster answers ({str(error).splitlines()[0]}); start one with `ray start "
            "--head`, and join it with `ray start --address`"
        ) from error
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    with tempfile.TemporaryDirectory(prefix="forebay-ray-") as folder:
        cluster = RayCluster(config, _router(config, Path(folder)), tell)
        told = False
        try:
            while not stop.is_set():
                cluster.look()
                if cluster.ready and not told:
                    told = True
                    ready(cluster.ready)
                stop.wait(LOOK_S)
        finally:
            cluster.stop()
            ray.shutdown()
    return 0


def _router(config: RayConfig, folder: Path) -> RouterProcess:
    """Not started; with its keys."""
    keys, flags = folder / "keys", []
    keys.mkdir(mode=0o700)
    secret = keys / "secret.key"
    secret.touch(mode=0o600)
    secret.write_bytes(config.pair.public + b"\n" + config.pair.secret + b"\n")
    (keys / f"{SERVER}.pub").write_bytes(config.spec.pair.public + b"\n")
    if config.worker_key is not None:
        file = folder / "worker-key"
        file.touch(mode=0o600)
        file.write_text(config.worker_key)
        flags = ["--worker-key", str(file)]
    return RouterProcess(folder, config.hosts, config.port, flags)
