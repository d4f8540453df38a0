"""Untrusted files read with limits, and JSON checked as it is taken apart.

Every reader runs inside ``reading``: what libraries raise on damaged input becomes one sentence
that names the file.

A few bytes of an ``.npz`` file can request any amount of memory, by a declared shape or by their
unpacked size. So sizes are compared before anything is allocated: the size in the zip directory,
the size that the array's header declares, and the number of bytes present. Nothing is unpickled."""

from __future__ import annotations

import csv
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.bounded_json import decode_json
from eplb.errors import EplbError, HistoryError

MAX_TEXT_BYTES = 64 * 2**20  # of a JSON, YAML or CSV file; 61 x 320 slots take 0.1 MB
MAX_FILE_BYTES = 64 * 2**30
MOST_EXACT = 2**53  # floats below are exact whole numbers
DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,  # NotImplementedError too: a compression that zipfile does not know
    LookupError,
    TypeError,
    AttributeError,
    MemoryError,
    ArithmeticError,
    SyntaxError,
    csv.Error,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def reading(path: Path, as_what: str) -> Iterator[None]:
    """Turn what damaged input raises into one sentence with the file's name.

    Raises:
        HistoryError: in place of what libraries raise; errors of this project keep their type.
    """
    try:
        yield
    except EplbError as exc:
        text = " ".join(str(exc).split())
        if "expected" not in text:
            text = f"{text}, expected {as_what}"
        if str(path) in text and text == str(exc):
            raise
        raise type(exc)(text if str(path) in text else f"{path}: {text}") from exc
    except FileNotFoundError as exc:
        raise HistoryError(f"{path} does not exist, expected {as_what}") from exc
    except MemoryError as exc:
        raise HistoryError(f"{path} needs too much memory as {as_what}") from exc
    except DAMAGED as exc:
        why = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise HistoryError(f"{path} cannot be read: {why}, expected {as_what}") from exc


def check_regular(path: Path, most: int = MAX_FILE_BYTES) -> int:
    """Size of a regular file; a pipe would be waited for without end.

    Raises:
        HistoryError: a folder, a device or a pipe, or a larger file.
    """
    if path.exists() and not path.is_file():
        raise HistoryError(f"{path} is no regular file, expected one")
    size = path.stat().st_size
    if size > most:
        raise HistoryError(f"{path} has {size} bytes, expected at most {most}")
    return size


def read_text_bytes(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a text file of bounded size."""
    size = check_regular(path, most)
    with path.open("rb") as file:
        return file.read(size)  # of a larger count, a buffer of that size would be allocated


def read_json(path: Path) -> Any:
    """JSON of bounded size and depth."""
    return decode_json(read_text_bytes(path), max_bytes=MAX_TEXT_BYTES)


def member(record: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """A required value of a JSON object, of a type; a boolean is no number.

    Raises:
        HistoryError: no object, no such key, or another type.
    """
    if not isinstance(record, Mapping):
        raise HistoryError(f"{where} is {_named(record)}, expected an object")
    if key not in record:
        raise HistoryError(f"{where} lacks {key!r}")
    value = record[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise HistoryError(f"{where}: {key} is {_named(value)}, expected {kinds}")
    return value


def whole_number(value: Any, where: str, low: int = 0, high: int = 2**31 - 1) -> int:
    """A whole number within limits; 9e2 is one.

    Raises:
        HistoryError: anything else.
    """
    if _is_whole(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        shown = value if isinstance(value, int) and abs(value) < 10**18 else _named(value)
        raise HistoryError(f"{where} is {shown}, expected {low}..{high}")
    return value


def int_array(value: Any, ndim: tuple[int, ...] | int, where: str) -> NDArray[np.int64]:
    """Nested lists of whole numbers as an array; every list of a level has the same length.

    162554.0 and 9e2 are whole numbers.

    Raises:
        HistoryError: fractions, text, lists of different lengths, or another number of axes.
    """
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    table = np.array(value if isinstance(value, list) else None, dtype=object)
    shape, flat = table.shape, table.ravel().tolist()
    if len(shape) not in allowed or not flat:
        raise HistoryError(
            f"{where} has shape {shape}, expected {' or '.join(map(str, allowed))} axes, none "
            "empty, and lists of an axis equally long"
        )
    if set(map(type, flat)) != {int}:
        for index, item in enumerate(flat):
            if type(item) is not int and not _is_whole(item):
                at = "".join(f"[{number}]" for number in np.unravel_index(index, shape))
                raise HistoryError(f"{where}{at} is {_named(item)}, expected a whole number")
        flat = list(map(int, flat))
    try:
        return np.array(flat, dtype=np.int64).reshape(shape)
    except OverflowError as exc:
        raise HistoryError(f"{where}: a number does not fit 64 bits") from exc


def _is_whole(value: Any) -> bool:
    return type(value) is float and value.is_integer() and abs(value) < MOST_EXACT


def whole_array(
    values: Any, shape: tuple[int | None, ...], where: str, low: int = 0, high: int = 2**48
) -> NDArray[Any]:
    """An array of whole numbers of a shape, within limits; None: any length. Floats become int64.

    Raises:
        HistoryError: it is none.
    """
    found: tuple[int, ...] = getattr(values, "shape", ())
    if len(found) != len(shape) or any(
        want not in (None, n) for want, n in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise HistoryError(f"{where} has shape {found}, expected integers [{wanted}]")
    kind = values.dtype.kind
    is_whole = kind == "f" and np.isfinite(values).all() and not np.mod(values, 1).any()
    if is_whole and np.abs(values).max(initial=0) < MOST_EXACT:
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu":
        raise HistoryError(f"{where} is of {values.dtype}, expected whole numbers")
    if values.size and not (values.min() >= low and values.max() <= high):
        raise HistoryError(f"{where} has {values.min()}..{values.max()}, expected {low}..{high}")
    found_values: NDArray[Any] = values
    return found_values


def to_json(record: Mapping[str, Any]) -> bytes:
    """A JSON object with one key a line, and one row of a table a line."""
    lines = [f"{json.dumps(key)}: {_as_rows(value)}" for key, value in record.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _as_rows(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def _named(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(
        type(value), type(value).__name__
    )


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
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise HistoryError(f"{name} ends after {len(data)} bytes, expected {num_bytes}")
    if stream.read(1):  # also has the archive's checksum looked at
        raise HistoryError(f"{name} goes on after its {num_bytes} bytes")
    return np.ndarray(shape, dtype, data, order="F" if is_fortran else "C")


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
