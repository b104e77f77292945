"""Both forms of the router's loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest

from forebay.scheduler.loops import without_compiled_loops

# Looked for, not imported: whoever imports the loops first compiles them, and every process collects these tests.
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="no numba here: the `router` extra brings it")


@pytest.fixture(scope="module", params=["numpy", pytest.param("compiled", marks=needs_numba)])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the module's tests in either form."""
    with without_compiled_loops() if request.param == "numpy" else nullcontext():
        yield request.param
