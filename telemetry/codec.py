"""Load samples as bytes: a fixed header, then names, then the two arrays, little-endian.

    header | deployment | run | slot_to_expert | tokens

Each array is stored in the narrowest integer type that holds it exactly. A sample of 58 layers x 9
slots takes 2.7 kB while no slot is empty or no slot got more than 65,535 tokens, else 3.3 kB at
most until counts pass 32 bits. The version byte lets a later layout (compressed, say) stand beside
this one; a reader refuses a version that it does not know.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.errors import HistoryError, StoreError
from eplb.load import LoadSample, Phase

SAMPLE_VERSION = 1

_MAGIC = b"EPLS"
_PHASES: tuple[Phase, ...] = get_args(Phase)  # a phase is stored as its place in this tuple
_DTYPES = tuple(np.dtype(name) for name in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8"))
# Magic, version and checksum never move, whatever the version: every reader must find them.
_PREFIX = struct.Struct("<4sBI")
# Dtypes of both arrays, phase; lengths of both names, layers, slots; rank, sequence, steps,
# generation; time.
_BODY = struct.Struct("<BBB4I5qd")


def sample_to_bytes(sample: LoadSample) -> bytes:
    """Pack a sample."""
    deployment, run = sample.deployment.encode(), sample.run.encode()
    held, tokens = _narrowest(sample.slot_to_expert), _narrowest(sample.tokens)
    body = _BODY.pack(
        _DTYPES.index(held.dtype),
        _DTYPES.index(tokens.dtype),
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
    rest = b"".join((body, deployment, run, held.tobytes(), tokens.tobytes()))
    return _PREFIX.pack(_MAGIC, SAMPLE_VERSION, zlib.crc32(rest)) + rest


def sample_from_bytes(record: bytes) -> LoadSample:
    """Unpack a sample.

    Raises:
        StoreError: damaged bytes, another kind of record, or an unknown version.
    """
    rest = _checked(record)
    held_code, tokens_code, phase, *counts = _BODY.unpack_from(rest)
    len_deployment, len_run, layers, slots, *numbers, time = counts
    rank, sequence, first_step, last_step, generation = numbers
    run_at = _BODY.size + len_deployment
    held_at = run_at + len_run
    tokens_at = held_at + layers * slots * _DTYPES[held_code].itemsize
    try:
        return LoadSample(
            rest[_BODY.size : run_at].decode(),
            rest[run_at:held_at].decode(),
            rank,
            sequence,
            time,
            first_step,
            last_step,
            _PHASES[phase],
            generation,
            np.frombuffer(rest[held_at:tokens_at], _DTYPES[held_code]).reshape(layers, slots),
            np.frombuffer(rest[tokens_at:], _DTYPES[tokens_code]).reshape(layers, slots),
        )
    except HistoryError as exc:
        raise StoreError(f"a sample record holds an impossible sample: {exc}") from exc


def _narrowest(values: NDArray[np.signedinteger[Any]]) -> NDArray[Any]:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in _DTYPES:
        bounds = np.iinfo(dtype)
        if bounds.min <= low and high <= bounds.max:
            return values.astype(dtype)
    raise AssertionError("int64, the last of the dtypes, holds every sample")


def _checked(record: bytes) -> bytes:
    """What follows the prefix, once the checksum says that it is what was written."""
    if len(record) < _PREFIX.size:
        raise StoreError(
            f"a sample record has {len(record)} bytes, expected at least {_PREFIX.size}"
        )
    magic, version, checksum = _PREFIX.unpack_from(record)
    if magic != _MAGIC:
        raise StoreError(f"a sample record starts with {magic!r}, expected {_MAGIC!r}")
    if version != SAMPLE_VERSION:
        raise StoreError(f"a sample record has version {version}, expected {SAMPLE_VERSION}")
    rest = record[_PREFIX.size :]
    found = zlib.crc32(rest)
    if found != checksum:
        raise StoreError(
            f"a sample record of {len(record)} bytes is damaged: "
            f"found checksum {found:08x}, expected {checksum:08x}"
        )
    return rest
