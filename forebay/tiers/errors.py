"""Errors of tiers."""

from __future__ import annotations

from forebay.errors import ForebayError


class TierFailed(ForebayError):
    """A tier can't go on in this process, but a new process may: the daemon starts one."""
