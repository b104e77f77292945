"""What can go wrong around KV events.

EventError
  EventEncodeError       an event can't be put on the wire in the chosen profile
  EventDecodeError       a payload isn't an event batch at all
  EndpointRefused        an endpoint would be open to the network without keys, or can't be understood
  EndpointUnavailable    the address is taken or doesn't exist on this machine
  TooManyStreams         the cap on namespaces with a stream of their own is reached
  ReplayFailed           a replay socket didn't answer in time, or not in the protocol
"""

from __future__ import annotations

from forebay.errors import ConfigError, ForebayError, ResourceError


class EventError(ForebayError):
    """Base of everything that the events package raises."""


class EventEncodeError(EventError):
    """An event can't be encoded in this profile. Publishers count it and go on."""


class EventDecodeError(EventError):
    """A payload isn't `[ts, [events], dp_rank]`. (One bad event in a good batch is counted instead.)"""


class EndpointRefused(EventError, ConfigError):
    """The endpoint isn't allowed as it stands. The message says what to change."""


class EndpointUnavailable(EventError, ResourceError):
    """The endpoint can't be bound on this machine now."""


class TooManyStreams(EventError, ResourceError):
    """Another namespace wants a stream, and the cap is reached."""


class ReplayFailed(EventError):
    """A replay didn't finish. What was received before it failed has been delivered."""
