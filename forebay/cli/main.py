"""`forebay COMMAND`: parses, runs, and turns errors into one line and an exit code.

    0  done            1  something is wrong (fsck found damage, a process failed)
    2  wrong usage or setting       3  no store (or worker) answers       4  the machine can't give what was asked for
    5  the model can't be served
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from forebay import __version__
from forebay.config import Arguments
from forebay.errors import ConfigError, ForebayError

COMMANDS = {
    "serve": "one machine: store, worker and front end as supervised processes",
    "store": "the store daemon: KV chunks in shared memory and files",
    "worker": "a compute worker",
    "frontend": "an OpenAI-compatible HTTP server in front of workers",
    "drain": "empty a worker on purpose, with no client noticing",
    "router": "an OpenAI-compatible proxy that sends requests where their prefix is",
    "route": "where a router would send a prompt, and why",
    "prepare": "assemble and convert a model ahead of time",
    "plan": "what fits: tokens and requests, on the devices and in a store",
    "stat": "what a store holds and does",
    "ls": "the chunks that a store or a directory holds",
    "fsck": "check every byte of a store's memory and files",
    "pin": "keep a prompt's chunks in memory for a while",
    "touch": "count a prompt's chunks as just used",
    "warm": "bring a prompt's chunks from the tiers into memory",
    "clear": "forget a namespace, a tenant, or what begins with a prefix",
    "events": "show KV events, compare them with a store, or retell them for its workers",
    "explain": "how long a prefix of a prompt each tier has, and why it ends there",
}
INTERRUPTED = 130
_WORKER_MODULES = {"torch", "numpy", "tokenizers", "safetensors", "jinja2", "gguf", "fastapi", "uvicorn", "starlette"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    logging.basicConfig(
        level=os.environ.get("FOREBAY_LOG", "INFO").upper(), stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ForebayError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _WORKER_MODULES:
            raise
        print(f"forebay: {error.name} isn't installed: pip install 'forebay[worker]' brings it", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough (head, less): not a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"forebay {__version__}")
        return 0
    command = arguments[0]
    if command not in COMMANDS:
        raise ConfigError(f"there is no command {command!r}; there are {', '.join(COMMANDS)}")
    module = importlib.import_module(f"forebay.cli.{command}")
    parser = Arguments(
        prog=f"forebay {command}", description=module.__doc__, formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    return int(module.run(vars(parser.parse_args(arguments[1:]))))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items())
    return (
        f"forebay {__version__}: a KV cache for language model serving that outlives its workers\n\n"
        f"usage: forebay COMMAND [--help]\n\n{lines}\n\n"
        "exit codes: 0 done, 1 something is wrong, 2 wrong usage, 3 no store or worker answers,\n"
        "            4 the machine can't give it, 5 the model can't be served"
    )
