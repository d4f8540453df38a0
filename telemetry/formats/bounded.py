"""Untrusted files read with limits, JSON checked as it is taken apart, files written atomically.

Every reader runs inside ``reading``: what libraries raise on damaged input becomes one sentence
that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.bounded_json import decode_json
from eplb.errors import ConfigError, EplbError, HistoryError

MAX_TEXT_BYTES = 64 * 2**20  # of a JSON, YAML or CSV file; 61 x 320 slots take 0.1 MB
MAX_FILE_BYTES = 64 * 2**30
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
        said = " ".join(str(exc).split())
        if str(path) in said and said == str(exc):
            raise
        raise type(exc)(said if str(path) in said else f"{path}: {said}") from exc
    except FileNotFoundError as exc:
        raise HistoryError(f"{path} does not exist, expected {as_what}") from exc
    except MemoryError as exc:
        raise HistoryError(f"{path} needs too much memory as {as_what}") from exc
    except DAMAGED as exc:
        why = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise HistoryError(f"{path} cannot be read as {as_what}: {why}") from exc


def check_regular(path: Path) -> int:
    """Size of a regular file; a pipe would be waited for without end.

    Raises:
        HistoryError: a folder, a device or a pipe.
    """
    if path.exists() and not path.is_file():
        raise HistoryError(f"{path} is no regular file, expected one")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise HistoryError(f"{path} has {size} bytes, expected at most {MAX_FILE_BYTES}")
    return size


def read_text_bytes(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a text file of bounded size."""
    size = check_regular(path)
    if size > most:
        raise HistoryError(f"{path} has {size} bytes, expected at most {most}")
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
        raise HistoryError(f"{where}: {key} is {_named(value)}, expected {_kinds(kind)}")
    return value


def whole_number(value: Any, where: str, low: int = 0, high: int = 2**31 - 1) -> int:
    """A whole number within limits.

    Raises:
        HistoryError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        shown = value if isinstance(value, int) and abs(value) < 10**18 else _named(value)
        raise HistoryError(f"{where} is {shown}, expected {low}..{high}")
    return value


def int_array(value: Any, ndim: tuple[int, ...] | int, where: str) -> NDArray[np.int64]:
    """Nested lists of whole numbers as an array; every list of a level has the same length.

    Raises:
        HistoryError: fractions, text, lists of different lengths, or another number of axes.
    """
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    shape: list[int] = []
    level: Any = value
    while isinstance(level, list) and len(shape) <= max(allowed):
        shape.append(len(level))
        level = level[0] if level else None
    if len(shape) not in allowed or 0 in shape:
        raise HistoryError(
            f"{where} has shape {tuple(shape)}, expected {' or '.join(map(str, allowed))} axes, "
            "none empty"
        )
    flat: list[Any] = [value]
    for length in shape:
        if not all(isinstance(one, list) and len(one) == length for one in flat):
            raise HistoryError(f"{where}: lists of different lengths, expected {tuple(shape)}")
        flat = [item for one in flat for item in one]
    if set(map(type, flat)) != {int}:
        raise HistoryError(f"{where}: found other values than whole numbers")
    try:
        return np.array(flat, dtype=np.int64).reshape(shape)
    except OverflowError as exc:
        raise HistoryError(f"{where}: a number does not fit 64 bits") from exc


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, or leave what was there.

    Raises:
        ConfigError: the file cannot be written.
    """
    unfinished = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            unfinished = Path(file.name)
            file.write(data)
        unfinished.chmod(0o666 & ~_umask())
        unfinished.replace(path)
    except OSError as exc:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def to_json(record: Mapping[str, Any]) -> bytes:
    """A JSON object with one key a line, and one row of a table a line."""
    lines = [f"{json.dumps(key)}: {_as_rows(value)}" for key, value in record.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _as_rows(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _named(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _kinds(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(one.__name__ for one in kinds)


def file_digest(path: Path) -> str:
    """A file's hash as a remark; nothing for a folder, whose manifest has it."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return f" (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
