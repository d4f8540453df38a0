"""Header of a safetensors file: where each tensor's bytes lie, without reading any of them.

8 bytes     length of the header, little endian
header      JSON: name -> dtype, shape, [begin, end) counted from the end of the header
data        the tensors
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from eplb.core.bounded_json import decode_json
from eplb.errors import CheckpointError
from runtime.checkpoints.identity import LENGTH_BYTES, MAX_HEADER_BYTES

# By the format's names. Types without arithmetic in torch are carried like any other.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, and its range of bytes in it."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    end: int


def read_header(path: Path, descriptor: int) -> dict[str, StoredTensor]:
    """Read and check the header of an open file.

    Raises:
        CheckpointError: the file is truncated, or its header is damaged or names what lies past
            the end.
    """
    size = os.fstat(descriptor).st_size
    refusal = f"weight file {path} of {size} bytes is truncated or damaged"
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise CheckpointError(
            f"{refusal}: its header has {length} bytes, "
            f"expected at most {min(MAX_HEADER_BYTES, max(0, size - LENGTH_BYTES))}"
        )
    text = os.pread(descriptor, length, LENGTH_BYTES)
    try:
        found = decode_json(text, max_bytes=MAX_HEADER_BYTES)
    except ValueError as exc:
        raise CheckpointError(f"{refusal}: {exc}") from exc
    if not isinstance(found, dict):
        raise CheckpointError(f"{refusal}: its header is no JSON object")
    data = LENGTH_BYTES + length
    tensors = {}
    for name, entry in found.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _stored(name, entry, path.name, data)
        except ValueError as exc:
            raise CheckpointError(f"{refusal}: tensor {name} {exc}") from exc
        if tensors[name].end > size:
            raise CheckpointError(
                f"{refusal}: tensor {name} ends at byte {tensors[name].end} of {size}"
            )
    return tensors


def _stored(name: str, entry: Any, file: str, data: int) -> StoredTensor:
    """Check one entry; ValueError says what is wrong."""
    if not isinstance(entry, dict):
        raise ValueError("has no description")
    kind, shape, offsets = (
        entry.get("dtype"),
        _counts(entry, "shape"),
        _counts(entry, "data_offsets"),
    )
    if len(offsets) != 2:
        raise ValueError(f"has data_offsets {offsets}, expected begin and end")
    if kind == "F4" and shape and shape[-1] % 2 == 0:  # two values in a byte: carried as bytes
        kind, shape = "U8", [*shape[:-1], shape[-1] // 2]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"has dtype {kind!r}, expected one of: {', '.join(DTYPES)}, F4")
    dtype = DTYPES[kind]
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(
            f"of shape {shape} and dtype {kind} has {end - begin} bytes, "
            f"expected {prod(shape) * dtype.itemsize}"
        )
    return StoredTensor(name, file, dtype, tuple(shape), data + begin, data + end)


def _counts(entry: dict[str, Any], key: str) -> list[int]:
    found = entry.get(key)
    if not isinstance(found, list) or any(type(n) is not int or n < 0 for n in found):
        raise ValueError(f"has {key} {found!r}, expected a list of whole numbers")
    return found
