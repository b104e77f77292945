"""Make a model ready to be served: assemble the demo model, convert a GGUF file once, into the cache directory.

Prints the directory. `forebay serve` and `forebay worker` do the same when they need it; this does it ahead of time.

example:
  forebay prepare --demo
  forebay prepare ./qwen3-0.6b-q8_0.gguf
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from forebay.cli.places import cache_dir
from forebay.config import Setting, add_settings, boolean, path, resolve
from forebay.errors import ConfigError

SETTINGS = (
    Setting("model", path, None, "GGUF file, or a safetensors directory (which is ready as it is)", positional=True),
    Setting("demo", boolean, False, "Gemma 3 270M from the installed demo package", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Prepare one model."""
    values = resolve("prepare", SETTINGS, flags)
    if values["demo"] == (values["model"] is not None):
        raise ConfigError("which model? give a GGUF file or a safetensors directory, or --demo for Gemma 3 270M")
    from forebay.models.loading import checkpoint_directory
    from forebay.workers.checkpoint import Progress

    progress = Progress()
    model = _demo(progress) if values["demo"] else values["model"].absolute()
    directory = checkpoint_directory(model, progress=progress)
    progress.finish()
    print(directory)
    return 0


def _demo(progress: Any) -> Path:
    from forebay.models.demo import demo_path, terms_notice

    _notice_once(terms_notice())
    return demo_path(progress=progress)


def _notice_once(text: str) -> None:
    """Terms of use are shown once to each user, and then remembered in the cache directory."""
    stamp = cache_dir() / "gemma-terms-shown"
    if stamp.exists():
        return
    print(text, file=sys.stderr, flush=True)
    try:
        stamp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        stamp.touch()
    except OSError as error:
        print(f"can't remember that this was shown: {stamp}: {error.strerror}", file=sys.stderr)
