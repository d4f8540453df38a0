"""Windows of a ``.jsonl`` that an engine appends to, read from where the previous poll ended.

A window has a fixed number of lines of load. It ends sooner where the map changes, so that each
window was counted under one map. A window of less than half its lines is skipped and counted.

Shapes:  L MoE layers, E experts, P physical slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import SEEK_END
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eplb.core.bounded_json import decode_json
from eplb.core.placement import Placement
from eplb.errors import ConfigError, EplbError
from simulations.shadow.windows import Observed, Skips
from telemetry.formats.bounded import reading
from telemetry.formats.engines.vllm import MAX_LINE_BYTES, Step, StepLines, current_of
from telemetry.formats.types import ReadOptions, resolve, rows_in_order


class LineWindows:
    """The windows of one file."""

    def __init__(self, path: Path, options: ReadOptions, steps: int, skips: Skips) -> None:
        self._path, self._options, self._steps, self._skips = path, options, steps, skips
        self._lines = StepLines(options)
        self._offset = self._number = 0
        self._sum: NDArray[np.int64] | None = None
        self._held: NDArray[np.int64] | None = None
        self._count = self._first = 0
        self.notes: tuple[str, ...] = ()

    def poll(self, *, is_last: bool) -> Iterator[Observed]:
        """Give the windows that the lines complete which came since the previous poll."""
        for line in self._new_lines(is_last=is_last):
            self._number += 1
            if line.isspace():
                continue
            where = f"{self._path.name} line {self._number}"
            try:
                with reading(self._path, "a line of load"):
                    record = decode_json(line, max_bytes=MAX_LINE_BYTES)
                    step = self._lines.take(record, f"line {self._number}")
            except EplbError as exc:
                self._skips.add(where, "line not readable", str(exc))
                continue
            if step is not None:
                yield from self._add(step)
        if is_last:
            yield from self._end()

    def _new_lines(self, *, is_last: bool) -> Iterator[bytes]:
        """Complete lines; in the last poll what is left, too."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, SEEK_END)
                if size < self._offset:
                    why = f"{self._path} has {size} bytes, expected {self._offset} or more"
                    self._skips.add(str(self._path), "cut off after it was read", why)
                    return
                file.seek(self._offset)
                while line := file.readline(MAX_LINE_BYTES + 1):
                    if not (is_last or line.endswith(b"\n") or len(line) > MAX_LINE_BYTES):
                        return
                    self._offset += len(line)
                    yield line
        except OSError as exc:
            why = f"{self._path} cannot be read: {exc.strerror}"
            self._skips.add(str(self._path), "not readable", why)

    def _add(self, step: Step) -> Iterator[Observed]:
        if self._held is not None and not np.array_equal(self._held, step.held):
            yield from self._end()
        if self._sum is None:
            self._sum, self._held = np.zeros_like(step.tokens), step.held
            self._count, self._first = 0, self._number
        self._sum = self._sum + step.tokens
        self._count += 1
        if self._count == self._steps:
            yield from self._end()

    def _end(self) -> Iterator[Observed]:
        """The window that was filled, if it has enough lines."""
        tokens, held = self._sum, self._held
        self._sum = self._held = None
        if tokens is None or held is None:
            return
        where = f"{self._path.name} lines from {self._first}"
        if 2 * self._count < self._steps:
            why = f"{self._count} lines, expected {self._steps} or at least half"
            self._skips.add(where, "a short window", why)
            return
        try:
            rows, layers, self.notes = resolve(rows_in_order(len(held)), self._options)
        except ConfigError as exc:
            self._skips.add(where, "not readable", f"{self._path}: {exc}")
            return
        placement = self._placement(held[rows], where)
        if placement is not None:
            yield Observed(tokens[rows], layers, placement, where)

    def _placement(self, held: NDArray[np.int64], where: str) -> Placement | None:
        """The map; None and noted where it lacks experts, as between two sizes of a group."""
        assert self._lines.num_experts is not None, "lines of load name it"
        placement, notes = current_of(held, self._lines.num_experts)
        if placement is None:
            self._skips.add(where, "a map that lacks experts", notes[0])
        return placement
