"""Weight files of a checkpoint, safetensors: found by the index, read by byte ranges.

    8 bytes     length of the header, little endian
    header      JSON: name -> dtype, shape, [begin, end) counted from the end of the header
    data        the tensors

Nothing is mapped: a read past the end of a file that was cut short is an error here, while a mapped
file would end the process with a signal.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from eplb.core.bounded_json import decode_json
from eplb.errors import CheckpointError
from runtime.checkpoints.identity import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    Identity,
    identity_of,
    shards_of,
)

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
    """One tensor of a file, or a part of one, and its range of bytes in the file."""

    name: str  # the whole tensor's
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.start


class WeightFiles:
    """Opened weight files. Every header is read at once, so damage shows at the start.

    Raises:
        CheckpointError: no index, or a file is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        file_of = shards_of(path)
        files = [SINGLE_FILE] if file_of is None else sorted(set(file_of.values()))
        headers = {file: self._open(file) for file in files}
        if file_of is None:
            file_of = dict.fromkeys(headers[SINGLE_FILE], SINGLE_FILE)
        self._file_of: Mapping[str, str] = file_of
        # None: the index names a tensor that its file lacks, refused when it is used.
        self._tensors = {name: headers[file].get(name) for name, file in file_of.items()}

    def _open(self, file: str) -> dict[str, StoredTensor]:
        path = self.path / file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block for ever
            self._descriptors[file] = descriptor
            self._sizes[file] = os.fstat(descriptor).st_size
            return _read_header(path, descriptor)
        except FileNotFoundError as exc:
            raise CheckpointError(f"weight file {path} is missing, the index names it") from exc
        except (OSError, ValueError) as exc:  # ValueError: a name with a zero byte
            raise CheckpointError(f"weight file {path} cannot be read: {exc}") from exc

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def stored(self, name: str) -> StoredTensor:
        """Type, shape and place of a tensor, without reading it.

        Raises:
            CheckpointError: the index or its file has no such tensor.
        """
        found = self._tensors.get(name)
        if found is None:
            file = self._file_of.get(name)
            where = f" in {file}, where the index has it" if file else ""
            raise CheckpointError(f"{self.path}: tensor {name} is missing{where}")
        return found

    def read_into(self, stored: StoredTensor, into: torch.Tensor) -> None:
        """Fill contiguous uint8 ``into`` on the host with the bytes of a tensor.

        Raises:
            CheckpointError: a file of the checkpoint is shorter than when it was opened, or the
                disk cannot be read.
        """
        for file, size in self._sizes.items():
            found = os.fstat(self._descriptors[file]).st_size
            if found < size:
                raise CheckpointError(
                    f"weight file {self.path / file} is truncated: {found} bytes, expected {size}"
                )
        view = into.numpy().data
        done = 0
        try:
            while done < len(view):
                start = stored.start + done
                count = os.preadv(self._descriptors[stored.file], [view[done:]], start)
                if not count:
                    raise CheckpointError(
                        f"weight file {self.path / stored.file} is truncated: "
                        f"tensor {stored.name} ends at byte {stored.end}"
                    )
                done += count
        except OSError as exc:
            raise CheckpointError(f"weight file {self.path / stored.file}: {exc}") from exc

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """Read a tensor; raises what ``read_into`` does."""
        raw = torch.empty(stored.num_bytes, dtype=torch.uint8)
        self.read_into(stored, raw)
        return raw.view(stored.dtype).view(stored.shape)

    def identity(self) -> Identity:
        """State of the files as they are on disk now.

        Raises:
            CheckpointError: a file is missing.
        """
        return identity_of(self.path, self._sizes)


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _read_header(path: Path, descriptor: int) -> dict[str, StoredTensor]:
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
    kind = entry.get("dtype")
    shape, offsets = _counts(entry, "shape"), _counts(entry, "data_offsets")
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
