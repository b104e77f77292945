"""What can go wrong with models, by what the caller does about it.

ForebayError
  ModelError                a model can't be served
    ModelNotFound           there is nothing at this path
    CheckpointBroken        files are cut short, damaged, or contradict one another
    UnsupportedArchitecture the files are sound, but no family here can run them
    DemoUnavailable         the optional demo model isn't installed
  ChatError                 a conversation can't be turned into a prompt
    NoChatTemplate          the model has no chat template
    ChatTemplateError       the template refused the messages, or is broken
"""

from __future__ import annotations

from forebay.errors import ForebayError


class ModelError(ForebayError):
    """A model can't be served. The message names the file and what to do."""

    exit_code = 5


class ModelNotFound(ModelError):
    """There is no checkpoint at the path."""


class CheckpointBroken(ModelError):
    """A checkpoint is cut short, damaged, or contradicts itself."""


class UnsupportedArchitecture(ModelError):
    """A sound checkpoint of an architecture, or with a setting, that isn't supported."""


class DemoUnavailable(ModelError):
    """The optional demo model isn't installed."""


class ChatError(ForebayError):
    """A conversation can't be turned into a prompt. The message may be shown to the client."""


class NoChatTemplate(ChatError):
    """A base model has no chat template; none is invented."""


class ChatTemplateError(ChatError):
    """The template refused these messages, is broken, or ran out of bounds."""
