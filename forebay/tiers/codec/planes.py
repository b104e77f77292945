"""zstd for numbers: the bytes of equal place in a value lie together, then one pass of zstd's entropy coder.

Values of a KV cache hardly ever repeat, so there is nothing for zstd to find; but the bytes that hold sign and
exponent take few values. Sorted out, they shrink to some 3 bits each, while mantissas don't shrink at all. That is
nearly all that is to be had (the bytes' entropy); more effort in the search makes it slower and no smaller.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.errors import CorruptChunk
from forebay.tiers.codec.envelope import Compression
from forebay.tiers.codec.errors import MissingLibrary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

SAMPLE_BYTES = 32 << 10
WORTH = 0.97
"""A payload that doesn't get smaller than this share is stored as it is."""
WIDTHS = {Compression.ZSTD: 1, Compression.ZSTD_PLANES_2: 2, Compression.ZSTD_PLANES_4: 4}

@dataclass(frozen=True, slots=True)
class Packed:
    """A payload, compressed or not."""

    how: Compression
    data: bytes | memoryview


@dataclass
class _Tools:
    """One thread's compressor, decompressor, and memory for planes, as large as the largest payload so far."""

    compressor: Any
    decompressor: Any
    planes: Bytes


class Compressor:
    """Compresses and restores payloads. May be used by several threads; each has tools of its own."""

    def __init__(self) -> None:
        """Raises MissingLibrary without numpy and zstandard."""
        try:
            import numpy
            import zstandard
        except ImportError as error:
            raise MissingLibrary("this tier's chunks are compressed; pip install 'forebay[compress]'") from error
        self._np = numpy
        self._zstd = zstandard
        self._local = threading.local()

    def compress(self, payload: memoryview) -> Packed:
        """The payload itself where compression isn't worth it."""
        how = self._choose(payload)
        if how is not Compression.NONE:
            data = self._pack(payload, how)
            if len(data) <= WORTH * len(payload):
                return Packed(how, data)
        return Packed(Compression.NONE, payload)

    def _choose(self, payload: memoryview) -> Compression:
        """What suits a piece from the middle best. Each plane is tried alone: in so small a piece they would share
        one code, which in a whole payload they don't."""
        middle = len(payload) // 2 // 64 * 64
        sample = payload[max(0, middle - SAMPLE_BYTES // 2) :][:SAMPLE_BYTES]
        fit = [how for how, width in WIDTHS.items() if len(payload) % width == len(sample) % width == 0]
        sizes = {how: self._size(sample, how) for how in fit}
        best = min(sizes, key=lambda how: sizes[how])
        return best if sizes[best] <= WORTH * len(sample) else Compression.NONE

    def _size(self, sample: memoryview, how: Compression) -> int:
        compress = self._tools().compressor.compress
        return sum(len(compress(plane)) for plane in self._split(sample, WIDTHS[how]))

    def _pack(self, payload: memoryview, how: Compression) -> bytes:
        return bytes(self._tools().compressor.compress(self._split(payload, WIDTHS[how]).reshape(-1)))

    def _split(self, payload: memoryview, width: int) -> Bytes:
        """The planes, one a row; valid until this thread's next call."""
        np, tools = self._np, self._tools()
        if width == 1:
            whole: Bytes = np.frombuffer(payload, np.uint8).reshape(1, -1)
            return whole
        if len(tools.planes) < len(payload):
            tools.planes = np.empty(len(payload), np.uint8)
        planes = tools.planes[: len(payload)].reshape(width, -1)
        values = np.frombuffer(payload, f"<u{width}")
        for at, plane in enumerate(planes):
            # Four times as fast as copying with a stride.
            np.copyto(plane, values >> (8 * at), casting="unsafe")
        return planes

    def restore(self, packed: memoryview, how: Compression, payload: memoryview) -> None:
        """Fill `payload` with what was compressed. Raises CorruptChunk unless that is exactly what comes out."""
        width = WIDTHS[how]
        if len(payload) % width:
            raise CorruptChunk(f"a payload of {len(payload)} bytes has no values of {width}")
        try:
            # Told before anything is made, so that damage can't ask for more memory than the slot has.
            length = self._zstd.frame_content_size(packed)
            if length != len(payload):
                raise CorruptChunk(f"{length} bytes would come out, the envelope says {len(payload)}")
            whole = self._tools().decompressor.decompress(packed, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise CorruptChunk(f"the payload can't be decompressed: {error}") from error
        self._join(whole, width, payload)

    def _join(self, whole: bytes, width: int, payload: memoryview) -> None:
        np = self._np
        values = np.frombuffer(payload, f"<u{width}")
        *others, last = np.frombuffer(whole, np.uint8).reshape(width, -1)
        np.copyto(values, last)
        for plane in reversed(others):
            np.left_shift(values, 8, out=values)
            np.bitwise_or(values, plane, out=values)

    def _tools(self) -> _Tools:
        tools: _Tools | None = getattr(self._local, "tools", None)
        if tools is None:
            # Look for long repetitions only, and not hard.
            parameters = self._zstd.ZstdCompressionParameters(
                strategy=self._zstd.STRATEGY_FAST, window_log=17, hash_log=9, min_match=7, compression_level=1
            )
            tools = self._local.tools = _Tools(
                self._zstd.ZstdCompressor(compression_params=parameters),
                self._zstd.ZstdDecompressor(),
                self._np.empty(0, self._np.uint8),
            )
        return tools
