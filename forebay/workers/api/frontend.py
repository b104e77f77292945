"""`forebay frontend`: one process, one model, one worker's socket, one port."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from forebay.errors import AlreadyRunning, ConfigError
from forebay.ipc.sockets import socket_path
from forebay.models.chat import ChatTemplate
from forebay.models.errors import NoChatTemplate
from forebay.models.tokenizer import Tokenizer
from forebay.workers.api.app import make_app
from forebay.workers.api.keys import load_keys, open_to_all
from forebay.workers.api.link import WorkerLink
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.service import ApiService

log = logging.getLogger(__name__)

STOP_S = 5


@dataclass(frozen=True)
class FrontendConfig:
    """Settings of one front end. `state_dir` keeps the secret from which tenants' salts are derived."""

    worker: str
    model: Path
    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    label: str = ""
    api_keys: Path | None = None
    max_queue: int = 256
    give_up_s: float = 120.0
    listen_fd: int | None = None


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
    try:
        bound.bind((host, port))
    except socket.gaierror as error:
        bound.close()
        raise ConfigError(f"--host {host!r}: no such address ({error.strerror})") from error
    except OSError as error:
        bound.close()
        raise AlreadyRunning(f"port {port} on {host} can't be used ({error.strerror}); choose another with --port") from error
    return bound


def run_frontend(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT. Raises ForebayError if it can't start."""
    if not is_loopback(config.host) and config.api_keys is None:
        raise ConfigError(f"--host {config.host} is open to the network; that needs --api-keys FILE")
    if config.api_keys is None:
        keys = open_to_all(config.state_dir)
    else:
        keys = load_keys(config.api_keys, config.state_dir)
    # A supervisor hands its own bound socket over, so that clients wait while a front end is replaced.
    bound = bind(config.host, config.port) if config.listen_fd is None else socket.socket(fileno=config.listen_fd)
    tokenizer = Tokenizer.load(config.model)
    try:
        chat: ChatTemplate | None = ChatTemplate.load(config.model)
    except NoChatTemplate:
        chat = None  # a base model: /v1/chat/completions says so
    link = WorkerLink(socket_path(config.worker), config.max_queue, config.give_up_s)
    service = ApiService(link, tokenizer, chat, Metrics(), config.label or config.model.name)
    app = make_app(service, keys)
    server = uvicorn.Server(
        uvicorn.Config(
            app, loop="uvloop", http="httptools", log_level="warning", access_log=False,
            timeout_graceful_shutdown=STOP_S, h11_max_incomplete_event_size=1 << 16,
        )
    )  # fmt: skip
    bound.listen(1024)
    log.info("serving %s on http://%s:%d", service.model, config.host, config.port)
    server.run(sockets=[bound])
    return 0
