"""`forebay frontend`: one process, one model, its workers' sockets, one port."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from forebay.errors import AlreadyRunning, ConfigError
from forebay.ipc.sockets import socket_path
from forebay.models.chat import ChatTemplate
from forebay.models.errors import NoChatTemplate
from forebay.models.tokenizer import Tokenizer
from forebay.tiers.p2p.options import Address
from forebay.workers.api.app import make_app
from forebay.workers.api.fleet import Fleet
from forebay.workers.api.keys import load_keys, open_to_all
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.service import ApiService
from forebay.workers.api.splitting import RemotePrefill, Splitter, StoreView
from forebay.workers.api.text import Chat, Codec
from forebay.workers.api.tool_formats import FORMATS, ToolFormat, format_of

log = logging.getLogger(__name__)

BACKLOG = 1024
STOP_S = 20.0
"""How long streams may go on after SIGTERM, unless it is set."""
ENDING_S = 2
"""How long it may then take to tell the clients of those that go on still."""


@dataclass(frozen=True)
class FrontendConfig:
    """Settings of one front end. `state_dir` keeps the secret from which tenants' salts are derived; `shutdown_s` is
    how long streams may go on after SIGTERM. `tool_call_parser` names a format, "auto" takes the chat template's.
    `prefill` workers, or front ends of other hosts, compute prompts of which `store` lacks `split_at` tokens."""

    workers: Sequence[str]
    model: Path
    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    label: str = ""
    api_keys: Path | None = None
    max_queue: int = 256
    give_up_s: float = 120.0
    listen_fd: int | None = None
    kv_address: Address | None = None
    shutdown_s: float = STOP_S
    tool_call_parser: str = "auto"
    prefill: Sequence[str | Address] = ()
    store: str | None = None
    split_at: int = 512

    def check(self) -> None:
        """Raises ConfigError that names the setting."""
        if not is_loopback(self.host) and self.api_keys is None:
            raise ConfigError(f"--host {self.host} is open to the network; that needs --api-keys FILE")
        if self.prefill and self.store is None:
            raise ConfigError("--prefill needs --store: what isn't stored yet decides who computes it")
        sockets = [*self.workers, *(one for one in self.prefill if isinstance(one, str))]
        names = [socket_path(one).stem for one in sockets]
        if len(set(names)) < len(names):
            raise ConfigError(f"--worker and --prefill: two sockets are called alike ({', '.join(names)}); their names "
                              "tell workers apart")  # fmt: skip


def is_loopback(host: str) -> bool:
    """Does this address stay on this machine?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises AlreadyRunning or ConfigError, naming the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: no token waits for an ACK
    try:
        bound.bind((host, port))
    except socket.gaierror as error:
        bound.close()
        raise ConfigError(f"--host {host!r}: no such address ({error.strerror})") from error
    except OSError as error:
        bound.close()
        raise AlreadyRunning(
            f"port {port} on {host} can't be used ({error.strerror}); choose another with --port"
        ) from error
    return bound


def run_frontend(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT. Raises ForebayError if it can't start."""
    config.check()
    keys = load_keys(config.api_keys, config.state_dir) if config.api_keys else open_to_all(config.state_dir)
    # A supervisor hands its own bound socket over, so that clients wait while a front end is replaced.
    bound = bind(config.host, config.port) if config.listen_fd is None else socket.socket(fileno=config.listen_fd)
    with bound:
        codec, chat = load_text(config.model)
        local = [socket_path(one) for one in config.prefill if isinstance(one, str)]
        fleet = Fleet(list(map(socket_path, config.workers)), config.max_queue, config.give_up_s, local)
        tools, splitter = _tool_format(config, chat), _splitter(config, fleet)
        service = ApiService(fleet, codec, chat, Metrics(), config.label, config.kv_address, tools, splitter)
        bound.listen(BACKLOG)
        log.info("serving on http://%s:%d", config.host, config.port)
        serve_app(make_app(service, keys), fleet, bound, config.shutdown_s)
    return 0


def _splitter(config: FrontendConfig, fleet: Fleet) -> Splitter | None:
    if not config.prefill or config.store is None:
        return None
    remotes = [RemotePrefill(one) for one in config.prefill if isinstance(one, Address)]
    return Splitter(fleet, StoreView(config.store), config.split_at, remotes)


def _tool_format(config: FrontendConfig, chat: Chat | None) -> ToolFormat | None:
    if config.tool_call_parser != "auto":
        return FORMATS[config.tool_call_parser]
    return None if chat is None else format_of(chat.source)


def load_text(model: Path) -> tuple[Codec, Chat | None]:
    """Tokenizer and chat template of a model; a base model has no template. Raises ModelError."""
    directory = model if model.is_dir() else _converted(model)
    codec = Tokenizer.load(directory)
    try:
        return codec, ChatTemplate.load(directory)
    except NoChatTemplate:
        return codec, None


def _converted(model: Path) -> Path:
    # It imports torch; a front end of a directory does without.
    from forebay.models.loading import checkpoint_directory

    return checkpoint_directory(model)


class AppServer(uvicorn.Server):
    """uvicorn, but answers that are open at its stop go on for `shutdown_s`; then they are ended in order, not torn."""

    def __init__(self, app: ASGIApp, fleet: Fleet, shutdown_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app, loop="uvloop", http="httptools", log_level="warning", access_log=False, server_header=False,
                timeout_graceful_shutdown=int(shutdown_s + ENDING_S + 1),
            )
        )  # fmt: skip
        self._fleet = fleet
        self._shutdown_s = shutdown_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn: stop accepting, then wait for what is open."""
        if self._fleet.calls:
            log.info("stopping: %d generations may go on for %.0f s", len(self._fleet.calls), self._shutdown_s)
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._shutdown_s, self._fleet.end_all, "the server stops; try again")
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def serve_app(app: ASGIApp, fleet: Fleet, listener: socket.socket, shutdown_s: float = STOP_S) -> None:
    """Answer on a listening socket until SIGTERM or SIGINT."""
    # uvicorn raises the signal again once it has stopped, for others to hear; for us it is a clean end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    AppServer(app, fleet, shutdown_s).run(sockets=[listener])
