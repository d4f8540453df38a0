"""Load over a range of time as ``.npy``, CSV or JSON, in a file that is sent once it is whole.

The number of rows is known only after the last one, and a store that fails half-way is answered
with a problem: so rows are written to an unnamed file first, and memory holds one of them.

Shapes:  T rows, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import io
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from api.http.problems import ProblemType, Refused
from eplb.core.load import Phase
from eplb.declared import Meaning
from telemetry.load.load_range import LoadRow, LoadSpan, load_rows
from telemetry.state.store import StateStore

Format = Literal["json", "npy", "csv"]
Of = Literal["tokens", "rank_load", "windows"]
MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "npy": "application/x-npy",
    "csv": "text/csv",
}
CHUNK_BYTES = 256 * 2**10
COLUMNS = ("time", "seconds", "first_step", "last_step", "generation", "missing_ranks")


MOST_BYTES: dict[Format, int] = {"npy": 256 * 2**20, "csv": 256 * 2**20, "json": 32 * 2**20}
AT_ONCE = 2  # matrices that are made: each takes a processor
AHEAD_S = 60.0  # clocks of ranks may differ by that time

_making = threading.BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True)
class LoadMatrix:
    """Load over a range of time, oldest first."""

    of: Of
    shape: Annotated[list[int], Meaning("shape of the values", example=[720, 58, 256])]
    values: Annotated[
        list[list[list[int]] | list[float]],
        Meaning("[T, L, E] tokens of experts, [T, L, R] of ranks, or [T, 6] of windows"),
    ]
    windows: list[LoadSpan]


class Written(NamedTuple):
    """A file to send, after its head and before its tail."""

    file: IO[bytes]
    head: bytes
    tail: bytes
    num_bytes: int
    media_type: str

    def chunks(self) -> Iterator[bytes]:
        """Give the bytes in order, and close the file."""
        with self.file as file:
            file.seek(0)
            yield self.head
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
            if self.tail:
                yield self.tail


def load_file(
    store: StateStore,
    form: Format,
    of: Of,
    *,
    since: float,
    until: float | None,
    phase: Phase | None,
) -> Written:
    """Write the load of a range of time.

    Raises:
        Refused: more bytes than the format may have, a run of another model or number of ranks
            than the first, or too many such files are written now.
        StoreError: the store cannot be read.
    """
    newest = store.backend.now() + AHEAD_S
    end = newest if until is None else min(until, newest)
    if not _making.acquire(blocking=False):
        why = f"{AT_ONCE} matrices of load are being made, expected fewer"
        raise Refused(ProblemType.TOO_BUSY, why)
    file = tempfile.TemporaryFile(prefix="eplb-load-")  # noqa: SIM115 - chunks() closes it
    try:
        return _written(file, load_rows(store, since, end, phase), of, form)
    except BaseException:
        file.close()
        raise
    finally:
        _making.release()


def _written(file: IO[bytes], rows: Iterable[LoadRow], of: Of, form: Format) -> Written:
    shape: tuple[int, ...] | None = None
    windows, size, number = list[dict[str, Any]](), 0, 0
    for number, row in enumerate(rows, start=1):
        values = _values(row, of)
        if shape is not None and values.shape != shape:
            raise Refused(
                ProblemType.OTHER_SHAPE,
                f"run {row.run!r} has {of} of shape {list(values.shape)} from time {row.time:.3f} "
                f"on, those before {list(shape)}: expected a range with one of them",
            )
        shape = values.shape
        text = _text(row, values, form, is_first=number == 1)
        size += len(text)
        if size > MOST_BYTES[form]:
            raise Refused(
                ProblemType.TOO_MUCH_LOAD,
                f"{number} rows up to time {row.time:.3f} take more than {MOST_BYTES[form]} bytes, "
                "expected a range with fewer",
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
    return Written(file, head, tail, len(head) + size + len(tail), MEDIA_TYPES[form])


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
    by_layer = zip(row.layer_ids, values.tolist(), strict=True)
    lines = [f"{about},{layer},{','.join(map(str, found))}" for layer, found in by_layer]
    return (head if is_first else "").encode() + ("\n".join(lines) + "\n").encode()


def _npy_head(shape: tuple[int, ...], of: Of) -> bytes:
    kind = "<f8" if of == "windows" else "<i8"
    head = io.BytesIO()
    described = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()
