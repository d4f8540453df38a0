"""Rows of load as ``.npy``, CSV or JSON, in a file that is sent once it is whole.

The number of rows is known only after the last one, and a store that fails half-way is answered
with a problem: so rows are written to an unnamed file first, and memory holds one of them.

Shapes:  T rows, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.errors import EplbError
from telemetry.load.load_range import LoadRow

Format = Literal["json", "npy", "csv"]
Of = Literal["tokens", "rank_load", "windows"]
MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "npy": "application/x-npy",
    "csv": "text/csv",
}
CHUNK_BYTES = 256 * 2**10
COLUMNS = ("time", "seconds", "first_step", "last_step", "generation", "missing_ranks")


class TooLarge(EplbError):
    """More load than one answer may have."""


class OtherShape(EplbError):
    """Rows of several shapes, which are no matrix."""


class Written(NamedTuple):
    """A file to send, after its head and before its tail."""

    file: IO[bytes]
    head: bytes
    tail: bytes
    num_bytes: int

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes in order, and close the file."""
        with self.file as file:
            file.seek(0)
            yield self.head
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
            if self.tail:
                yield self.tail


def write_load(rows: Iterable[LoadRow], of: Of, form: Format, most_bytes: int) -> Written:
    """Write rows of load.

    Raises:
        TooLarge: more than ``most_bytes``.
        OtherShape: a row of another model or number of ranks than the first.
        StoreError: the store cannot be read.
    """
    file = tempfile.TemporaryFile(prefix="eplb-load-")  # noqa: SIM115 - chunks() closes it
    try:
        return _written(file, rows, of, form, most_bytes)
    except BaseException:
        file.close()
        raise


def _written(
    file: IO[bytes], rows: Iterable[LoadRow], of: Of, form: Format, most_bytes: int
) -> Written:
    shape: tuple[int, ...] | None = None
    windows, size, number = list[dict[str, Any]](), 0, 0
    for number, row in enumerate(rows, start=1):
        values = _values(row, of)
        if shape is not None and values.shape != shape:
            raise OtherShape(
                f"run {row.run!r} has {of} of shape {list(values.shape)} from time {row.time:.3f} "
                f"on, those before {list(shape)}: expected a range with one of them"
            )
        shape = values.shape
        text = _text(row, values, form, is_first=number == 1)
        size += len(text)
        if size > most_bytes:
            raise TooLarge(
                f"{number} rows up to time {row.time:.3f} take more than {most_bytes} bytes, "
                "expected a range with fewer"
            )
        file.write(text)
        if form == "json":
            windows.append({"run": row.run, "phase": row.phase} | _columns(row))
    of_all = (number, *(shape or (0, 0)))
    head, tail = _npy_head(of_all, of) if form == "npy" else b"", b""
    if form == "json":
        about = json.dumps({"of": of, "shape": of_all}, separators=(",", ":"))
        head = f'{about[:-1]},"values":['.encode()
        tail = f'],"windows":{json.dumps(windows, separators=(",", ":"))}}}'.encode()
    return Written(file, head, tail, len(head) + size + len(tail))


def _values(row: LoadRow, of: Of) -> NDArray[Any]:
    """[L, E] or [L, R] tokens; [6] of a window."""
    if of == "windows":
        return np.array(list(_columns(row).values()), dtype=np.float64)
    return row.tokens if of == "tokens" else row.received


def _columns(row: LoadRow) -> dict[str, float]:
    return {name: getattr(row, name) for name in COLUMNS}


def _text(row: LoadRow, values: NDArray[Any], form: Format, *, is_first: bool) -> bytes:
    if form == "npy":
        return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    if form == "json":
        return (b"" if is_first else b",") + json.dumps(
            values.tolist(), separators=(",", ":")
        ).encode()
    about = ",".join(map(repr, _columns(row).values()))
    head = ",".join(COLUMNS)
    if values.ndim == 1:
        return (f"{head}\n" if is_first else "").encode() + f"{about}\n".encode()
    if is_first:
        head = f"{head},layer,{','.join(map(str, range(values.shape[1])))}\n"
    by_layer = enumerate(values.tolist())
    lines = [f"{about},{layer},{','.join(map(str, found))}" for layer, found in by_layer]
    return (head if is_first else "").encode() + ("\n".join(lines) + "\n").encode()


def _npy_head(shape: tuple[int, ...], of: Of) -> bytes:
    kind = "<f8" if of == "windows" else "<i8"
    head = io.BytesIO()
    described = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()
