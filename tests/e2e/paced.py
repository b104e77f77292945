"""`python -m tests.e2e.paced FILE worker ...`: Forebay's commands, but that a step that ends with a token takes as
many seconds more as FILE says, if there is one.

So what a test does in the middle of an answer is done in its middle, however long this machine takes to do it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOW_S, WAIT_S = 0.01, 0.3
"""A pace at which a client keeps up, and one at which an answer lasts for longer than anybody needs to do anything."""


@dataclass(frozen=True)
class Pace:
    """How fast the workers of one cluster are. Each call takes effect with their next steps."""

    file: Path

    @property
    def module(self) -> str:
        """What python runs of them."""
        return f"tests.e2e.paced {self.file}"

    def flow(self) -> None:
        """Slow enough that what a client has seen is about what there is."""
        self._write(FLOW_S)

    def wait(self) -> None:
        """No answer ends before the next call."""
        self._write(WAIT_S)

    def free(self) -> None:
        """As fast as they can."""
        self.file.unlink(missing_ok=True)

    def _write(self, seconds: float) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(str(seconds))
        partial.replace(self.file)


def pace(file: Path) -> None:
    """Let the engine of this process read it before each step."""
    from forebay.workers.engine import Engine

    step = Engine._step

    def paced(self: Any, plan: Any) -> None:
        if any(work.samples for work in plan.works):
            with contextlib.suppress(FileNotFoundError):
                time.sleep(float(file.read_text()))
        step(self, plan)

    Engine._step = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    from forebay.parent import follow_parent

    follow_parent()
    from forebay.cli.main import main

    name, *arguments = sys.argv[1:]
    pace(Path(name))
    sys.exit(main(arguments))
