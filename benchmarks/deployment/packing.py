"""A stand-in for ``zstandard`` where it is not installed; imported before anything that packs.

Hosts of GPU benchmarks may lack it, and ``telemetry`` cannot be imported without. The stand-in
packs with zlib at its fastest level, for the stores of one run of a benchmark alone.
"""

from __future__ import annotations

import sys
import zlib
from importlib.util import find_spec
from types import ModuleType

PACKED_BY = "zstandard" if find_spec("zstandard") is not None else "zlib"
_SIZE_BYTES = 8


class _Compressor:
    def __init__(self, level: int) -> None:
        self._level = level

    def compress(self, data: bytes) -> bytes:
        """Its size, and the data."""
        return len(data).to_bytes(_SIZE_BYTES, "little") + zlib.compress(data, self._level)


class _Decompressor:
    def decompress(self, frame: bytes, *, allow_extra_data: bool) -> bytes:
        """The data again."""
        return zlib.decompress(frame[_SIZE_BYTES:])


def _size(frame: bytes) -> int:
    return int.from_bytes(frame[:_SIZE_BYTES], "little")


if PACKED_BY == "zlib":
    stand_in = ModuleType("zstandard")
    vars(stand_in).update(
        ZstdCompressor=_Compressor,
        ZstdDecompressor=_Decompressor,
        ZstdError=zlib.error,
        frame_content_size=_size,
    )
    sys.modules["zstandard"] = stand_in
