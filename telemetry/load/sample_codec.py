"""Load samples as bytes: a fixed header, then names, then the two arrays, little-endian.

    prefix | header | deployment | run | slot_to_expert and tokens

Each array is in the narrowest integer type that holds it, its bytes sorted by significance, and
both are one zstd frame: the upper bytes of counts hardly differ, so that zstd finds long runs of
them. Level 1, because higher ones save less than 3 % on samples and cost twice the time. A sample
of 58 layers x 9 slots takes 1.2 to 2.2 kB. Roll-ups are packed in the same way.
"""

from __future__ import annotations

import struct
import threading
import zlib
from typing import Any, get_args

import numpy as np
import zstandard
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from eplb.errors import HistoryError, StoreError

DTYPES = tuple(np.dtype(name) for name in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8"))
_BOUNDS = tuple((int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in DTYPES)
# 58 layers x 10,000 slots of 8 bytes are 5 MB. A larger record is malformed.
MAX_UNPACKED_BYTES = 64 << 20

# Magic, version and checksum never move, whatever the version: every reader must find them.
PREFIX = struct.Struct("<4sBI")
_MAGIC_AND_VERSION = 5
_LEVEL = 1


class UnknownVersion(StoreError):
    """A record that another version of this program wrote."""


class _Coders(threading.local):
    """One compressor and decompressor for each thread: they are not to be shared, nor cheap."""

    def __init__(self) -> None:
        # Without zstd's own checksum: the record's covers the header too.
        self.packer = zstandard.ZstdCompressor(level=_LEVEL)
        self.unpacker = zstandard.ZstdDecompressor()


_coders = _Coders()


def seal(magic: bytes, version: int, rest: bytes) -> bytes:
    """Put the prefix before a record's bytes; its checksum covers magic and version too."""
    start = PREFIX.pack(magic, version, 0)[:_MAGIC_AND_VERSION]
    return PREFIX.pack(magic, version, zlib.crc32(rest, zlib.crc32(start))) + rest


def check_version(record: bytes, kind: str, magic: bytes, expected: int) -> None:
    """Refuse a record of another version.

    Raises:
        UnknownVersion: it is not the ``expected`` one.
        StoreError: another kind of record, or none at all.
    """
    if len(record) < PREFIX.size:
        raise StoreError(f"a {kind} has {len(record)} bytes, expected at least {PREFIX.size}")
    found, version, _ = PREFIX.unpack_from(record)
    if found != magic:
        raise StoreError(f"a {kind} starts with {found!r}, expected {magic!r}")
    if version != expected:
        raise UnknownVersion(f"a {kind} has version {version}, expected {expected}")


def unseal(record: bytes, kind: str) -> bytes:
    """Return the payload after the prefix, if its checksum is correct.

    Raises:
        StoreError: it is not.
    """
    rest = record[PREFIX.size :]
    found = zlib.crc32(rest, zlib.crc32(record[:_MAGIC_AND_VERSION]))
    _, _, expected = PREFIX.unpack_from(record)
    if found != expected:
        raise StoreError(
            f"a {kind} of {len(record)} bytes is damaged: "
            f"found checksum {found:08x}, expected {expected:08x}"
        )
    return rest


def narrowest(values: NDArray[np.signedinteger[Any]]) -> NDArray[Any]:
    """Return counts in the narrowest type that holds them all."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype, (least, most) in zip(DTYPES, _BOUNDS, strict=True):
        if least <= low and high <= most:
            return values.astype(dtype)
    raise AssertionError("int64, the last of the dtypes, holds every count")


def shuffled(values: NDArray[Any]) -> bytes:
    """Return an array's bytes: the lowest of every value, then the next, and so on."""
    return values.reshape(-1, 1).view(np.uint8).T.tobytes()


def unshuffled(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Restore the array from what ``shuffled`` gave."""
    sorted_bytes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(sorted_bytes.T).view(dtype).reshape(shape)


def compress(data: bytes) -> bytes:
    """Return bytes as one zstd frame that names its size."""
    return _coders.packer.compress(data)


def decompress(frame: bytes, kind: str, num_bytes: int) -> bytes:
    """Make ``num_bytes`` again of a frame; nothing larger is ever allocated.

    Raises:
        StoreError: the frame is damaged, or holds another number of bytes.
    """
    if num_bytes > MAX_UNPACKED_BYTES:
        raise StoreError(
            f"a {kind} unpacks to {num_bytes} bytes, expected {MAX_UNPACKED_BYTES} at most"
        )
    try:
        # Asked before anything is unpacked: a frame of some bytes may hold gigabytes of zeros.
        named = zstandard.frame_content_size(frame)
        if named != num_bytes:
            raise StoreError(f"a {kind} unpacks to {named} bytes, expected {num_bytes}")
        return _coders.unpacker.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise StoreError(f"a {kind} cannot be unpacked: {exc}, expected one zstd frame") from exc


SAMPLE_VERSION = 2  # counts up with each change of the layout

_MAGIC = b"EPLS"
_KIND = "sample record"
_PHASES: tuple[Phase, ...] = get_args(Phase)  # a phase is stored as its place in this tuple
# Dtypes of both arrays, phase; lengths of both names, layers, slots; rank, sequence, steps,
# generation; time.
_HEADER = struct.Struct("<BBB4I5qd")


def sample_to_bytes(sample: LoadSample) -> bytes:
    """Pack a sample."""
    deployment, run = sample.deployment.encode(), sample.run.encode()
    held, tokens = narrowest(sample.slot_to_expert), narrowest(sample.tokens)
    header = _HEADER.pack(
        DTYPES.index(held.dtype),
        DTYPES.index(tokens.dtype),
        _PHASES.index(sample.phase),
        len(deployment),
        len(run),
        *sample.tokens.shape,
        sample.rank,
        sample.sequence,
        sample.first_step,
        sample.last_step,
        sample.generation,
        sample.time,
    )
    arrays = compress(shuffled(held) + shuffled(tokens))
    return seal(_MAGIC, SAMPLE_VERSION, b"".join((header, deployment, run, arrays)))


def sample_from_bytes(record: bytes) -> LoadSample:
    """Unpack a sample.

    Raises:
        UnknownVersion: of another version.
        StoreError: damaged bytes, or another kind of record.
    """
    check_version(record, _KIND, _MAGIC, SAMPLE_VERSION)
    rest = unseal(record, _KIND)
    try:
        return _sample_of(rest)
    except HistoryError as exc:
        raise StoreError(f"a {_KIND} holds an impossible sample: {exc}") from exc
    except (ValueError, IndexError, struct.error) as exc:
        # Sealed as it is, yet not as that version packs: written by a program with a fault.
        raise StoreError(
            f"a {_KIND} cannot be read: {exc}, expected the layout of version {SAMPLE_VERSION}"
        ) from exc


def _sample_of(rest: bytes) -> LoadSample:
    held_code, tokens_code, phase, *counts = _HEADER.unpack_from(rest)
    len_deployment, len_run, layers, slots, *numbers, time = counts
    rank, sequence, first_step, last_step, generation = numbers
    run_at = _HEADER.size + len_deployment
    arrays_at = run_at + len_run
    shape, dtypes = (layers, slots), (DTYPES[held_code], DTYPES[tokens_code])
    held_bytes, token_bytes = (layers * slots * dtype.itemsize for dtype in dtypes)
    arrays = decompress(rest[arrays_at:], _KIND, held_bytes + token_bytes)
    held = unshuffled(arrays[:held_bytes], dtypes[0], shape)
    tokens = unshuffled(arrays[held_bytes:], dtypes[1], shape)
    return LoadSample(
        rest[_HEADER.size : run_at].decode(),
        rest[run_at:arrays_at].decode(),
        rank,
        sequence,
        time,
        first_step,
        last_step,
        _PHASES[phase],
        generation,
        held,
        tokens,
    )
