"""Nothing is raised into an engine and nothing is swallowed unseen; what isn't about vLLM needs none."""

from __future__ import annotations

import logging
import pkgutil
import subprocess
import sys

import pytest

from forebay import connectors
from forebay.connectors.guard import guarded, guarded_errors


class Door:
    """As a connector is: each call has an answer for when it fails."""

    @guarded(lambda: (0, False))
    def matched(self, tokens: int) -> tuple[int, bool]:
        """Fails below 0."""
        if tokens < 0:
            raise LookupError(tokens)
        return tokens, True


def test_what_fails_gives_its_fallback_and_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    before = guarded_errors["matched"]
    door = Door()
    with caplog.at_level(logging.ERROR):
        assert [door.matched(3), door.matched(-1), door.matched(4)] == [(3, True), (0, False), (4, True)]
    assert guarded_errors["matched"] == before + 1 and "LookupError" in caplog.text


def test_only_vllms_own_package_needs_vllm_and_a_bare_installation_needs_no_torch() -> None:
    """Loads, stores and lookups are decided without torch; only copies need it."""
    bare = [module.name for module in pkgutil.iter_modules(connectors.__path__)]
    bare = sorted(set(bare) - {"copying", "moving", "teams", "vllm"})
    assert len(bare) > 10
    code = "import sys\n" + "\n".join(f"import forebay.connectors.{name}" for name in bare)
    code += "\nassert not {'torch', 'vllm', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    code += "import forebay.connectors.moving\nassert 'vllm' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
