"""Reads named arrays of an untrusted ``.npz`` file.

A few bytes can request any amount of memory, by a declared shape or by their unpacked size. So
sizes are compared before anything is allocated: the size in the zip directory, the size that the
array's header declares, and the number of bytes present. Nothing is unpickled.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from eplb.errors import HistoryError
from telemetry.formats.bounded import check_regular, reading

MAX_RATIO = 50  # unpacked over packed bytes; recorded routing packs to a tenth
SMALL_BYTES = 4 * 2**20  # an array up to this size may pack better
MAX_HEADER_BYTES = 10_000
MAX_MEMBERS = 1000
SHOWN_NAMES = 8
MOST_SHOWN = 100  # characters of a name
MAGIC = b"\x93NUMPY"
HEADER = re.compile(
    rb"\{'descr': '(?P<order>[<>|=])(?P<kind>[a-zA-Z])(?P<size>\d{1,4})', "
    rb"'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:\d{1,18}, ?)*(?:\d{1,18})?)\),? ?\}"
)
LENGTH_OF_VERSION = {1: struct.Struct("<H"), 2: struct.Struct("<I")}
CHUNK_BYTES = 2**20

Arrays = dict[str, NDArray[Any]]


def read_arrays(path: Path, wanted: Collection[str]) -> tuple[Arrays, str]:
    """Read those of the ``wanted`` arrays that a file has; others are not unpacked.

    Returns:
        The arrays, and the names of all arrays in the file as text.

    Raises:
        HistoryError: the file is missing, damaged, or needs more memory than its size allows.
    """
    with reading(path, "an .npz file"):
        file_bytes = check_regular(path)
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                raise HistoryError(f"trace {path} is a bare array, expected an .npz file")
            with zipfile.ZipFile(file) as archive:
                return _read(archive, wanted, file_bytes)


def _read(archive: zipfile.ZipFile, wanted: Collection[str], file_bytes: int) -> tuple[Arrays, str]:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise HistoryError(f"found {len(members)} arrays, expected at most {MAX_MEMBERS}")
    held = {member.filename.removesuffix(".npy"): member for member in members}
    arrays = {name: _array(archive, held[name], file_bytes) for name in wanted if name in held}
    shown = [_shown(name) for name in sorted(held)]
    return arrays, ", ".join(shown[:SHOWN_NAMES])[:200] or "nothing"


def _shown(name: str) -> str:
    """A name of the file's own, as an error may have it."""
    return (name if name.isprintable() else ascii(name))[:MOST_SHOWN]


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file_bytes: int) -> NDArray[Any]:
    name = _shown(member.filename.removesuffix(".npy"))
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # The others are unpacked without a limit, whatever size was asked for.
        raise HistoryError(f"{name} is packed by method {member.compress_type}, expected 0 or 8")
    if member.compress_size > file_bytes:
        raise HistoryError(
            f"{name} takes {member.compress_size} bytes, expected at most {file_bytes}, the file's"
        )
    most = max(SMALL_BYTES, MAX_RATIO * member.compress_size)
    if member.file_size > most:
        raise HistoryError(
            f"{name} unpacks from {member.compress_size} to {member.file_size} bytes, "
            f"expected at most {most}; an array that really packs so well may be saved unpacked"
        )
    with archive.open(member) as stream:
        return _numbers(stream, member.file_size, name)


def read_npy(path: Path) -> NDArray[Any]:
    """Read a file of one array; nothing is unpickled.

    Raises:
        HistoryError: damaged, of another type than numbers, or of another size than declared.
    """
    size = check_regular(path)
    with path.open("rb") as file:
        return _numbers(file, size, "the array")


def _numbers(stream: IO[bytes], size: int, name: str) -> NDArray[Any]:
    """The array in a stream of so many bytes."""
    shape, is_fortran, dtype, header_bytes = _header(stream, name)
    num_bytes = math.prod(shape) * dtype.itemsize
    if header_bytes + num_bytes != size:
        raise HistoryError(
            f"{name} declares shape {shape} of {dtype}, {num_bytes} bytes, "
            f"expected the {size - header_bytes} that follow its header"
        )
    data, at = np.empty(num_bytes, dtype=np.uint8), 0
    while at < len(data):
        chunk = stream.read(min(CHUNK_BYTES, len(data) - at))
        if not chunk:
            raise HistoryError(f"{name} ends after {at} bytes, expected {len(data)}")
        data[at : at + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        at += len(chunk)
    if stream.read(1):  # also has the archive's checksum looked at
        raise HistoryError(f"{name} goes on after its {len(data)} bytes")
    return np.ndarray(shape, dtype, data.data, order="F" if is_fortran else "C")


def npy_kind(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type that a file of one array declares."""
    check_regular(path)
    with path.open("rb") as file:
        shape, _, dtype, _ = _header(file, "the array")
    return shape, dtype


def _header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, order, type and the number of bytes before the data."""
    start = stream.read(len(MAGIC) + 2)
    version = start[len(MAGIC)] if start[: len(MAGIC)] == MAGIC and len(start) == 8 else 0
    if version not in LENGTH_OF_VERSION:
        raise HistoryError(f"{name} is no array of format 1 or 2")
    length_format = LENGTH_OF_VERSION[version]
    packed = stream.read(length_format.size)
    (length,) = length_format.unpack(packed)
    if length > MAX_HEADER_BYTES:
        raise HistoryError(f"{name} has a header of {length} bytes, expected {MAX_HEADER_BYTES}")
    text = stream.read(length)
    # Not by numpy: its parser of headers raises what no caller expects, and compiles the text.
    found = HEADER.fullmatch(text.strip())
    if found is None:
        raise HistoryError(f"{name} has no header of a table of numbers")
    kind, size = found["kind"].decode(), int(found["size"])
    if kind not in "iuf" or size not in (1, 2, 4, 8) or (kind, size) == ("f", 1):
        raise HistoryError(
            f"{name} holds {kind}{size}, expected integers or floats of up to 8 bytes"
        )
    dtype = np.dtype(f"{found['order'].decode().replace('|', '<')}{kind}{size}")
    shape = tuple(int(one) for one in found["shape"].split(b",") if one.strip())
    return shape, found["fortran"] == b"True", dtype, len(start) + len(packed) + length
