"""What clients have made the daemon hold for them: frames that aren't whole yet, and requests that wait. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ProtocolError


@dataclass(slots=True)
class Intake:
    """Bytes in hand of all connections together, at most `limit`. Each cap of one connection is generous to it; this
    one keeps many from using theirs at the same time."""

    limit: int
    bytes: int = 0
    refused: int = 0

    def change(self, before: int, after: int) -> None:
        """A connection that held `before` bytes holds `after` now. Raises ProtocolError, and takes nothing, if that
        is too much for all."""
        if after > before and self.bytes + after - before > self.limit:
            self.refused += 1
            raise ProtocolError(f"clients have more than {self.limit} bytes of requests in hand; come again later")
        self.bytes += after - before
        assert self.bytes >= 0, self.bytes
