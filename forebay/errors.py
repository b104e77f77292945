"""Every error that Forebay raises on purpose, as one tree.

    ForebayError
      ConfigError              a flag, environment variable or TOML value is wrong; names it
      StoreError               talking to the store
        StoreUnavailable       nobody answers on the socket (retry: the store may be starting)
        StoreRestarted         the store has a new boot id: leases and reservations are gone
        ProtocolError          the other side broke the wire protocol (don't retry)
        RequestRefused         the store understood and said no; `code` says why
      ResourceError            the machine can't give what was asked for
        AlreadyRunning         another process holds the socket, directory or lock
        NoSpace                memory or disk is exhausted
        NotWritable            a directory or file can't be written
        OtherVersion           a pool or directory was left by another version: it is neither read nor touched
        TierUnavailable        what a tier keeps its chunks on doesn't answer; the store goes on and tries again
      CorruptChunk             bytes don't match their header (always turned into a miss by callers)
        ForeignChunk           a header of another version

Packages add leaves of their own (`forebay.models.errors`, `forebay.events.errors`), one for each failure
that a caller treats differently. `exit_code` is what the command line exits with.
"""

from __future__ import annotations


class ForebayError(Exception):
    """Base of all. The message says what failed and what to do about it."""

    exit_code = 1


class ConfigError(ForebayError):
    """A setting has a value that can't be used. The message names the setting and what it takes."""

    exit_code = 2


class StoreError(ForebayError):
    """A conversation with the store failed."""


class StoreUnavailable(StoreError):
    """Nobody answers on the store's socket. Temporary: a supervisor may be restarting it."""

    exit_code = 3


class StoreRestarted(StoreError):
    """The store answered with another boot id. What was leased or reserved before is gone."""


class ProtocolError(StoreError):
    """The peer sent something that isn't in the protocol. Permanent for this connection."""


class RequestRefused(StoreError):
    """The store understood the request and refused it.

    `code` is one of the protocol's refusal codes, stable for programs; the message is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ResourceError(ForebayError):
    """The machine can't give what was asked for."""

    exit_code = 4


class AlreadyRunning(ResourceError):
    """Another living process holds this socket, directory or lock."""


class NoSpace(ResourceError):
    """Shared memory or disk is exhausted."""


class NotWritable(ResourceError):
    """A path can't be written by this user."""


class OtherVersion(ResourceError):
    """What is stored there is in formats of another version. The message says which, and what to do."""


class TierUnavailable(ResourceError):
    """The server, device or peer behind a tier isn't there now. It may come: the store starts without that tier."""


class CorruptChunk(ForebayError):
    """Bytes and header of a chunk disagree. Callers turn it into a miss; it is never served."""


class ForeignChunk(CorruptChunk):
    """A chunk in a format of another version, as far as that can be told. It is never served either."""
