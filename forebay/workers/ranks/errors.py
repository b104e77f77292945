"""What may go wrong between ranks."""

from __future__ import annotations

from forebay.errors import ForebayError


class RankLost(ForebayError):
    """A rank has ended, or doesn't answer: its worker can't go on, and ends too. A supervisor starts another one."""


class RankNotStarted(ForebayError):
    """A rank ended before the worker could serve. What was wrong stands above, in its own words."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
