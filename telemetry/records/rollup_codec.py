"""Roll-ups as bytes: metadata as JSON, then both arrays, in one zstd frame."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from eplb.errors import StoreError
from telemetry.records import envelope as packing
from telemetry.retention.rollup import Rollup

ROLLUP_VERSION = 1

_MAGIC = b"EPLR"
_KIND = "roll-up record"
_LENGTHS = struct.Struct("<II")  # bytes of the JSON text; of all, unpacked


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
    packing.version_of(record, _KIND, _MAGIC, known=(ROLLUP_VERSION,))
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
