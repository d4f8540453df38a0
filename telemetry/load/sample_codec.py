"""Load samples as bytes: a fixed header, then names, then the two arrays, little-endian.

    prefix | header | deployment | run | slot_to_expert and tokens

Each array is in the narrowest integer type that holds it, its bytes sorted by significance, and
both are one zstd frame. A sample of 58 layers x 9 slots takes 1.2 to 2.2 kB.
"""

from __future__ import annotations

import struct
from typing import get_args

from eplb.core.load import LoadSample, Phase
from eplb.errors import HistoryError, StoreError
from telemetry.load import envelope as packing

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
    arrays = packing.compress(packing.shuffled(held) + packing.shuffled(tokens))
    return packing.seal(_MAGIC, SAMPLE_VERSION, b"".join((header, deployment, run, arrays)))


def sample_from_bytes(record: bytes) -> LoadSample:
    """Unpack a sample.

    Raises:
        UnknownVersion: of another version.
        StoreError: damaged bytes, or another kind of record.
    """
    packing.check_version(record, _KIND, _MAGIC, SAMPLE_VERSION)
    rest = packing.unseal(record, _KIND)
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
    shape, dtypes = (layers, slots), (packing.DTYPES[held_code], packing.DTYPES[tokens_code])
    held_bytes, token_bytes = (layers * slots * dtype.itemsize for dtype in dtypes)
    arrays = packing.decompress(rest[arrays_at:], _KIND, held_bytes + token_bytes)
    held = packing.unshuffled(arrays[:held_bytes], dtypes[0], shape)
    tokens = packing.unshuffled(arrays[held_bytes:], dtypes[1], shape)
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
