"""Why a chunk that a codec has stored can't be had.

    CorruptChunk       its bytes aren't what was stored (`forebay.errors`)
      ForeignChunk     another version's envelope
      UnsealedChunk    it isn't encrypted, and this tier takes only what is
    CannotDecode       it may be well, but this process lacks what it takes to read it: a miss, no damage
      MissingKey
      MissingLibrary
"""

from __future__ import annotations

from forebay.errors import CorruptChunk, ForebayError


class UnsealedChunk(CorruptChunk):
    """A chunk that isn't encrypted, in a tier that encrypts. Nothing vouches for it, and it shouldn't stay there."""


class CannotDecode(ForebayError):
    """The chunk may be well, but can't be read here and now. A miss; nobody should remove or move it."""


class MissingKey(CannotDecode):
    """None of the tier's keys has the id that the chunk names."""


class MissingLibrary(CannotDecode):
    """The package that decodes this chunk isn't installed."""
