"""Roll-ups: what is kept of windows when their samples are forgotten.

A roll-up is the load of one run and phase over a stretch of wall-clock time. Retention makes
roll-ups of a minute from samples, and roll-ups of an hour from those of a minute.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import Phase
from eplb.errors import StoreError
from telemetry.load import sample_codec as packing

MINUTE = 60
HOUR = 3600
ROLLUP_VERSION = 1

_MAGIC = b"EPLR"
_KIND = "roll-up record"
_LENGTHS = struct.Struct("<II")  # bytes of the JSON text; of all, unpacked


@dataclass(frozen=True, eq=False)
class Rollup:
    """Tokens of all ranks from ``start`` for ``seconds``, by the ranks' clocks."""

    run: str
    phase: Phase
    seconds: int  # MINUTE or HOUR
    start: float  # seconds since the epoch, a multiple of ``seconds``
    first_step: int
    last_step: int  # inclusive
    num_samples: int
    generations: frozenset[int]  # that served; of a half-swapped migration, its base
    ranks: frozenset[int]  # those that sent samples
    tokens: NDArray[np.int64]  # [L, E] received by each expert, over all its replicas
    received: NDArray[np.int64]  # [L, R] received by each rank

    def __post_init__(self) -> None:
        freeze(self, tokens=owned(self.tokens, np.int64), received=owned(self.received, np.int64))


def joined(parts: Sequence[Rollup], seconds: int, start: float, phase: Phase) -> Rollup:
    """Return the sum of roll-ups of one run, as one of another length, start or phase."""
    return Rollup(
        parts[0].run,
        phase,
        seconds,
        start,
        min(part.first_step for part in parts),
        max(part.last_step for part in parts),
        sum(part.num_samples for part in parts),
        frozenset[int]().union(*(part.generations for part in parts)),
        frozenset[int]().union(*(part.ranks for part in parts)),
        np.sum([part.tokens for part in parts], axis=0),
        np.sum([part.received for part in parts], axis=0),
    )


def rollup_to_bytes(rollup: Rollup) -> bytes:
    """Pack a roll-up."""
    arrays = [packing.narrowest(values) for values in (rollup.tokens, rollup.received)]
    meta = vars(rollup) | {
        "generations": sorted(rollup.generations),
        "ranks": sorted(rollup.ranks),
        "arrays": [(packing.DTYPES.index(values.dtype), values.shape) for values in arrays],
    }
    del meta["tokens"], meta["received"]
    text = json.dumps(meta).encode()
    data = b"".join((text, *(packing.shuffled(values) for values in arrays)))
    lengths = _LENGTHS.pack(len(text), len(data))
    return packing.seal(_MAGIC, ROLLUP_VERSION, lengths + packing.compress(data))


def rollup_from_bytes(record: bytes) -> Rollup:
    """Unpack a roll-up.

    Raises:
        StoreError: damaged bytes, another kind of record, or an unknown version.
    """
    packing.check_version(record, _KIND, _MAGIC, ROLLUP_VERSION)
    rest = packing.unseal(record, _KIND)
    try:
        len_text, num_bytes = _LENGTHS.unpack_from(rest)
        data = packing.decompress(rest[_LENGTHS.size :], _KIND, num_bytes)
        meta: dict[str, Any] = json.loads(data[:len_text])
        arrays = list(_arrays(data[len_text:], meta.pop("arrays")))
        meta |= {name: frozenset(meta[name]) for name in ("generations", "ranks")}
        return Rollup(**meta, tokens=arrays[0], received=arrays[1])
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as exc:
        # Sealed as it is, yet not as this version packs: written by a program with a fault.
        raise StoreError(
            f"a {_KIND} cannot be read: {exc!r}, expected the layout of version {ROLLUP_VERSION}"
        ) from exc


def _arrays(data: bytes, described: list[tuple[int, tuple[int, int]]]) -> Iterator[NDArray[Any]]:
    for code, (num_rows, num_columns) in described:
        dtype = packing.DTYPES[code]
        num_bytes = num_rows * num_columns * dtype.itemsize
        yield packing.unshuffled(data[:num_bytes], dtype, (num_rows, num_columns))
        data = data[num_bytes:]
