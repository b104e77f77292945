"""The Triton kernels run as Python here. Triton decides that when it is imported, so it is imported for it."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from forebay.kernels.gpu import library

# Where there is no Triton nothing here can be imported; tests/kernels/test_triton.py says so.
collect_ignore_glob = [] if library.installed() else ["*.py"]


def _import_interpreted() -> None:
    """Triton's own helpers are made for the interpreter or for a compiler when they are imported. Who came before
    (torch brings it along) may have imported them for the other."""
    for name in list(sys.modules):
        ours = name.startswith(("forebay.kernels.gpu", "forebay.kernels.forms"))
        if ours or name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C")):
            del sys.modules[name]
    importlib.import_module("triton")


before = os.environ.get("TRITON_INTERPRET")
if library.installed():
    os.environ["TRITON_INTERPRET"] = "1"
    _import_interpreted()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests, not for processes that others start."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """The modules of these tests have been imported: the kernels are made."""
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = before
