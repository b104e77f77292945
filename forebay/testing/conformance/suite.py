"""What every tier owes, ours and others'. Subclass `TierConformance`, say how your tier is made, and run pytest.

    class TestMine(TierConformance):
        kind = "my_package.tier:MyTier"
        lacks = {"partial": "it knows keys and nothing else"}

        def options(self, quota):
            return {"path": str(self.folder / "db"), "quota_bytes": quota, "queue_bytes": QUEUE}

        def damage(self, driver, chunk): ...
        def stalled(self, driver): ...
"""

from __future__ import annotations

from forebay.testing.conformance.enduring import Enduring
from forebay.testing.conformance.keeping import Keeping
from forebay.testing.conformance.leaving import Leaving
from forebay.testing.conformance.looking import Looking
from forebay.testing.conformance.pressing import Pressing
from forebay.testing.conformance.storing import Storing
from forebay.testing.conformance.telling import Telling


class TierConformance(Storing, Looking, Leaving, Keeping, Telling, Pressing, Enduring):
    """The suite. See the module's text."""
