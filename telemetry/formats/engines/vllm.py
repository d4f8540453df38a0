"""vLLM: JSON lines of load, and the one line of an initial mapping.

Proposed upstream (vllm PR 41141) and not in release 0.33.0: experimental. Rows are MoE layers in
order. Tokens are those of slots, beside the map that they were counted under, so that a dump may
span rebalances. Lines are read one by one: memory does not grow with their number.

Shapes:  L MoE layers, E experts, P physical slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.bounded_json import decode_json
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import (
    check_regular,
    int_array,
    member,
    whole_number,
)
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    WriteOptions,
    Written,
    assignments,
    history_of,
    placement_of,
    rows_in_order,
    to_logical,
)

META, STATS = "eplb_load_meta", "eplb_load_stats"
MAPPING = "eplb_initial_mapping"
SIZES = ("num_ranks", "num_nodes", "num_layers")
MARKERS = ("session_metadata", "bench_run_start")
VERSION = 1
MAX_LINE_BYTES = 16 * 2**20  # 61 layers x 320 slots with their map take 0.3 MB
MAX_REDUNDANT = 1023
EXPERIMENTAL = "vLLM 0.33.0 reads no mapping; the format is that of its PR 41141"


class Step(NamedTuple):
    """One line of load."""

    number: int
    tokens: NDArray[np.int64]  # [L, E]
    held: NDArray[np.int64]  # [L, P] the map that they were counted under; -1: an empty slot


class StepLines:
    """Takes the lines of a load file one after another, and keeps what the first of them tell."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.model = ""
        self.sizes: dict[str, int] = {}  # ranks, nodes, layers and experts, once they are known
        self.num_markers = 0
        self._map: NDArray[np.int64] | None = None

    def take(self, record: Any, where: str) -> Step | None:
        """The load of a line; None: it holds none.

        Raises:
            HistoryError: the line is damaged, or does not fit those before it.
        """
        kind = member(record, "record_type", str, where)
        if kind in MARKERS:
            self.num_markers += 1
            return None
        if kind not in (META, STATS):
            raise HistoryError(f"{where} is {kind[:40]!r}, expected {META} or {STATS}")
        whole_number(record.get("version"), f"{where} version", VERSION, VERSION)
        names = SIZES if kind == META else ("num_ranks",)
        for name in (name for name in names if name in record):
            size = whole_number(record[name], f"{where} {name}", 1, 65_536)
            self.sizes.setdefault(name, size)
        if kind == META:
            self._take_meta(record, where)
            return None
        loads = int_array(member(record, "expert_load", list, where), 2, f"{where} expert_load")
        table = int_array(member(record, "p2l_map", list, where), 2, f"{where} p2l_map")
        if (expected := self.sizes.setdefault("num_layers", len(table))) != len(table):
            raise HistoryError(
                f"{where} has {len(table)} layers, expected {expected} as the lines before"
            )
        if self._map is None or not np.array_equal(table, self._map):
            self._take_map(table, where)
        number = whole_number(record.get("step"), f"{where} step", 0, 2**62)
        return Step(number, to_logical(loads, table, self.sizes["num_experts"], where), table)

    def _take_meta(self, record: Any, where: str) -> None:
        if (redundant := record.get("num_redundant_experts")) is not None:
            redundant = whole_number(redundant, f"{where} num_redundant_experts")
            if self.options.num_redundant not in (None, redundant):
                raise HistoryError(
                    f"{where} has {redundant} redundant experts, expected "
                    f"{self.options.num_redundant} as --redundant or the lines before"
                )
            self.options = replace(self.options, num_redundant=redundant)
        model, before = str(record.get("model") or "")[:200], self.model
        if before and model not in ("", before):
            raise HistoryError(f"{where} is of model {model}, expected {before} as lines before")
        self.model = model or before

    def _take_map(self, table: NDArray[np.int64], where: str) -> None:
        """Take the number of experts of the first map, and check each; -1 excuses missing ones."""
        largest = min(int(table.max()), table.size)
        if "num_experts" not in self.sizes:
            self.sizes["num_experts"] = self.options.experts_in(
                f"{where}: the map", largest, table.shape[1]
            )
        num_experts = self.sizes["num_experts"]
        for row, held in enumerate(table):
            missing = np.setdiff1d(np.arange(min(num_experts, held.size + 1)), held)
            if missing.size and held.min() >= 0:
                raise HistoryError(
                    f"{where}: p2l_map[{row}] has no expert {missing[0]}, expected all of "
                    f"{num_experts}"
                )
        self._map = table


class StepSums:
    """Sums steps that arrive one by one into at most ``most`` windows of as many steps."""

    def __init__(self, most: int) -> None:
        self._most, self._steps_each, self._num_steps = most, 1, 0
        self._windows: list[tuple[int, int, NDArray[np.int64]]] = []  # first, last step, tokens

    def add(self, step: int, tokens: NDArray[np.int64]) -> None:
        """Add the tokens [L, E] of one step."""
        if self._num_steps % self._steps_each:
            first, _, before = self._windows[-1]
            self._windows[-1] = (first, step, before + tokens)
        else:
            if len(self._windows) == 2 * self._most:
                self._join_pairs()
            self._windows.append((step, step, tokens))
        self._num_steps += 1

    def _join_pairs(self) -> None:
        pairs = [self._windows[at : at + 2] for at in range(0, len(self._windows), 2)]
        self._windows = [
            (pair[0][0], pair[-1][1], np.sum([tokens for *_, tokens in pair], axis=0))
            for pair in pairs
        ]
        self._steps_each *= 2

    def history(self) -> LoadHistory:
        """The windows."""
        if not self._windows:
            raise HistoryError(f"no line {STATS}, expected load")
        if len(self._windows) > self._most:
            self._join_pairs()
        first, last, tokens = zip(*self._windows, strict=True)
        return history_of(tokens, first, last)


def read_load(path: Path, options: ReadOptions) -> LoadFile:
    """Read load lines."""
    lines, sums = StepLines(options), StepSums(options.max_windows)
    held = np.zeros((0, 0), dtype=np.int64)
    last = -1  # a run begins with a line META, or at step 0
    for number, record in _records(path):
        if (step := lines.take(record, f"line {number}")) is None:
            last = -1 if record["record_type"] == META else last
            continue
        if step.number <= last and step.number:
            raise HistoryError(
                f"line {number} has step {step.number} after step {last}, expected rising steps"
            )
        sums.add(step.number, step.tokens)
        last, held = step.number, step.held
    history, layers = sums.history(), rows_in_order(len(held))
    marked = f"{lines.num_markers} lines of a benchmark's markers are ignored"
    notes = (marked,) if lines.num_markers else ()
    num_ranks, num_nodes = (lines.sizes.get(name) for name in ("num_ranks", "num_nodes"))
    current, further = current_of(held, history.num_experts)
    file = None if current is None else PlacementFile(current, layers, num_ranks)
    return LoadFile(history, layers, file, num_ranks, num_nodes, lines.model, (*notes, *further))


def current_of(
    held: NDArray[np.int64], num_experts: int
) -> tuple[Placement | None, tuple[str, ...]]:
    """The placement of a map [L, P], or why it is none."""
    if not all(
        np.isin(np.arange(num_experts), row).all() for row in held
    ):  # elastic expert parallelism between two sizes
        return None, ("the last map lacks experts, and is not taken as the current placement",)
    return Placement(held.astype(np.int32), num_experts), ()


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and object of each line that is not blank."""
    check_regular(path)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise HistoryError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
            if not line.isspace():
                yield number, decode_json(line, max_bytes=MAX_LINE_BYTES)


# -- mappings


def of_mapping(record: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of the line of an initial mapping."""
    kind = member(record, "record_type", str, "the file")
    if kind != MAPPING:
        raise HistoryError(f"the file is {kind[:40]!r}, expected {MAPPING}")
    whole_number(record.get("version"), "version", VERSION, VERSION)
    num_slots = whole_number(member(record, "num_slots", int, "the file"), "num_slots", 1)
    redundant = whole_number(
        member(record, "num_redundant_experts", int, "the file"), "num_redundant_experts"
    )
    given = member(record, "initial_global_assignments", dict, "the file")
    held = assignments(given, list(map(str, range(len(given)))), num_slots)
    if redundant >= num_slots:
        raise HistoryError(f"{redundant} redundant experts in {num_slots} slots, expected fewer")
    return placement_of(held, rows_in_order(len(held)), options, num_experts=num_slots - redundant)


def write_mapping(file: PlacementFile, options: WriteOptions) -> Written:
    """Write the line of an initial mapping."""
    placement = file.placement
    redundant = placement.num_slots - placement.num_experts
    if redundant > MAX_REDUNDANT:
        raise ConfigError(f"{redundant} redundant experts, vLLM has at most {MAX_REDUNDANT}")
    record = {
        "record_type": MAPPING,
        "version": VERSION,
        "num_redundant_experts": redundant,
        "num_slots": placement.num_slots,
        "initial_global_assignments": {
            str(ordinal): row for ordinal, row in enumerate(placement.slot_to_expert.tolist())
        },
    }
    text = json.dumps(record, separators=(",", ":"))
    return text.encode() + b"\n", (EXPERIMENTAL,)


ONE_SLOT = "tokens are written as those of one slot for each expert"


def write_load(file: LoadFile, options: WriteOptions) -> dict[str, bytes]:
    """Write load lines under the identity map: every expert in its own slot."""
    history, num_ranks = file.history, file.num_ranks or 1
    both: dict[str, Any] = {"version": VERSION, "num_ranks": num_ranks}
    sizes = {"num_groups": 1, "num_nodes": file.num_nodes or 1, "num_layers": history.num_layers}
    meta = {"record_type": META, "model": file.model, "num_redundant_experts": 0}
    identity = [list(range(history.num_experts))] * history.num_layers
    lines = [both | sizes | meta]
    for step, tokens in zip(history.last_step.tolist(), history.tokens.tolist(), strict=True):
        line = {"record_type": STATS, "step": step, "expert_load": tokens, "p2l_map": identity}
        lines.append(both | line)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return {"": text.encode()}
