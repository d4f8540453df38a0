"""Load samples as bytes: a fixed header, then names, then the two arrays, little-endian.

    prefix | header | deployment | run | slot_to_expert and tokens

Version 1 stores each array in the narrowest integer type that holds it. Version 2 shuffles and
compresses them besides, and its checksum covers the prefix too; a sample of 58 layers x 9 slots
takes 1.2 to 2.2 kB. Readers read both, so that they can be updated first and writers after them:
until then writers are configured to write version 1.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from eplb.errors import HistoryError, StoreError
from telemetry.records import envelope as packing

SAMPLE_VERSION = 2  # what is written by default
READABLE_VERSIONS = (1, 2)

_MAGIC = b"EPLS"
_KIND = "sample record"
_PHASES: tuple[Phase, ...] = get_args(Phase)  # a phase is stored as its place in this tuple
# Dtypes of both arrays, phase; lengths of both names, layers, slots; rank, sequence, steps,
# generation; time.
_HEADER = struct.Struct("<BBB4I5qd")


def sample_to_bytes(sample: LoadSample, version: int = SAMPLE_VERSION) -> bytes:
    """Pack a sample, as one of READABLE_VERSIONS."""
    assert version in READABLE_VERSIONS, f"version {version} cannot be written"
    deployment, run = sample.deployment.encode(), sample.run.encode()
    held, tokens = packing.narrowest(sample.slot_to_expert), packing.narrowest(sample.tokens)
    header = _HEADER.pack(
        packing.DTYPES.index(held.dtype),
        packing.DTYPES.index(tokens.dtype),
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
    if version == 1:
        rest = b"".join((header, deployment, run, held.tobytes(), tokens.tobytes()))
        return packing.PREFIX.pack(_MAGIC, 1, zlib.crc32(rest)) + rest
    arrays = packing.compress(packing.shuffled(held) + packing.shuffled(tokens))
    return packing.seal(_MAGIC, version, b"".join((header, deployment, run, arrays)))


def sample_from_bytes(record: bytes) -> LoadSample:
    """Unpack a sample of any of READABLE_VERSIONS.

    Raises:
        UnknownVersion: of none of them.
        StoreError: damaged bytes, or another kind of record.
    """
    version = packing.version_of(record, _KIND, _MAGIC, READABLE_VERSIONS)
    if version == 1:
        rest = record[packing.PREFIX.size :]
        packing.check(record, _KIND, zlib.crc32(rest))
    else:
        rest = packing.unseal(record, _KIND)
    try:
        return _sample_of(rest, version)
    except HistoryError as exc:
        raise StoreError(f"a {_KIND} holds an impossible sample: {exc}") from exc
    except (ValueError, IndexError, struct.error) as exc:
        # Sealed as it is, yet not as that version packs: written by a program with a fault.
        raise StoreError(
            f"a {_KIND} cannot be read: {exc}, expected the layout of version {version}"
        ) from exc


def _sample_of(rest: bytes, version: int) -> LoadSample:
    held_code, tokens_code, phase, *counts = _HEADER.unpack_from(rest)
    len_deployment, len_run, layers, slots, *numbers, time = counts
    rank, sequence, first_step, last_step, generation = numbers
    run_at = _HEADER.size + len_deployment
    arrays_at = run_at + len_run
    unpack = _plain_arrays if version == 1 else _packed_arrays
    dtypes = packing.DTYPES[held_code], packing.DTYPES[tokens_code]
    held, tokens = unpack(rest[arrays_at:], dtypes, (layers, slots))
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


Dtypes = tuple[np.dtype[Any], np.dtype[Any]]
Arrays = tuple[NDArray[Any], NDArray[Any]]


def _plain_arrays(data: bytes, dtypes: Dtypes, shape: tuple[int, int]) -> Arrays:
    middle = shape[0] * shape[1] * dtypes[0].itemsize
    held = np.frombuffer(data[:middle], dtypes[0]).reshape(shape)
    return held, np.frombuffer(data[middle:], dtypes[1]).reshape(shape)


def _packed_arrays(data: bytes, dtypes: Dtypes, shape: tuple[int, int]) -> Arrays:
    held_bytes, token_bytes = (shape[0] * shape[1] * dtype.itemsize for dtype in dtypes)
    unpacked = packing.decompress(data, _KIND, held_bytes + token_bytes)
    held = packing.unshuffled(unpacked[:held_bytes], dtypes[0], shape)
    return held, packing.unshuffled(unpacked[held_bytes:], dtypes[1], shape)
