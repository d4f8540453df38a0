"""vLLM: JSON lines of load, and the one line of an initial mapping.

Proposed upstream (vllm PR 41141) and not in release 0.33.0: experimental. Rows are MoE layers in
order. Tokens are those of slots, beside the map that they were counted under, so that a dump may
span rebalances. Lines are read one by one: memory does not grow with their number.

Shapes:  L MoE layers, E experts, P physical slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.bounded_json import decode_json
from eplb.core.placement import Placement
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import (
    check_regular,
    int_array,
    member,
    read_text_bytes,
    whole_number,
)
from telemetry.formats.repairs import filled, ranks_of
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    StepSums,
    placement_of,
    refuse_dense_rows,
    rows_in_order,
    to_logical,
)

META, STATS = "eplb_load_meta", "eplb_load_stats"
MAPPING = "eplb_initial_mapping"
MARKERS = ("session_metadata", "bench_run_start")
VERSION = 1
MAX_LINE_BYTES = 16 * 2**20  # 61 layers x 320 slots with their map take 0.3 MB
MAX_REDUNDANT = 1023
EXPERIMENTAL = "vLLM 0.33.0 reads no mapping; the format is that of its PR 41141"


@dataclass
class _Meta:
    """What the first line tells."""

    num_ranks: int | None = None
    num_nodes: int | None = None
    num_redundant: int | None = None
    num_layers: int | None = None
    model: str = ""


@dataclass(frozen=True, eq=False)
class Step:
    """One line of load."""

    number: int
    tokens: NDArray[np.int64]  # [L, E]
    held: NDArray[np.int64]  # [L, P] the map that they were counted under; -1: an empty slot


class StepLines:
    """Takes the lines of a load file one after another, and keeps what the first of them tell."""

    def __init__(self, options: ReadOptions) -> None:
        self.meta = _Meta(num_redundant=options.num_redundant)
        self.num_experts = options.num_experts
        self.num_markers = 0
        self._num_rows: int | None = None
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
        if kind == META:
            _take_meta(self.meta, record, where)
            return None
        loads = int_array(member(record, "expert_load", list, where), 2, f"{where} expert_load")
        table = int_array(member(record, "p2l_map", list, where), 2, f"{where} p2l_map")
        if self.meta.num_layers not in (None, len(table)):
            raise HistoryError(f"{where} has {len(table)} layers, expected {self.meta.num_layers}")
        if self._num_rows not in (None, len(table)):
            raise HistoryError(
                f"{where} has {len(table)} layers, the lines before {self._num_rows}"
            )
        if self._map is None or not np.array_equal(table, self._map):
            self._take_map(table, where)
        assert self.num_experts is not None, "taken with the map"
        number = whole_number(record.get("step"), f"{where} step", 0, 2**62)
        if loads.max() > 2**48:
            raise HistoryError(f"{where}: {loads.max()} tokens in a slot, expected fewer")
        tokens = to_logical(loads, table, self.num_experts, where)
        self.meta.num_ranks = self.meta.num_ranks or record.get("num_ranks")
        self._num_rows = len(table)
        return Step(number, tokens, table)

    def _take_map(self, table: NDArray[np.int64], where: str) -> None:
        """Take the number of experts of the first map, and check each; -1 excuses missing ones."""
        if self.num_experts is None:
            self.num_experts = _num_experts(table, self.meta.num_redundant, where)
        for row, held in enumerate(table):
            missing = np.setdiff1d(np.arange(min(self.num_experts, held.size + 1)), held)
            if missing.size and held.min() >= 0:
                raise HistoryError(
                    f"{where}: p2l_map[{row}] has no expert {missing[0]}, expected all of "
                    f"{self.num_experts}"
                )
        self._map = table


def read_load(path: Path, options: ReadOptions) -> LoadFile:
    """Read load lines."""
    lines, sums = StepLines(options), StepSums(options.max_windows)
    held: NDArray[np.int64] | None = None
    last = -1  # a run begins with a line META, or at step 0
    for number, record in _records(path):
        if (step := lines.take(record, f"line {number}")) is None:
            last = -1 if record["record_type"] == META else last
        else:
            if step.number <= last and step.number:
                raise HistoryError(
                    f"line {number} has step {step.number} after step {last}, expected rising steps"
                )
            last = step.number
            sums.add(step.number, step.tokens)
            held = step.held
    meta = lines.meta
    if held is None or lines.num_experts is None:
        raise HistoryError(f"no line {STATS}, expected load")
    if meta.num_ranks is not None:
        whole_number(meta.num_ranks, "num_ranks", 1, 65_536)
    layers = rows_in_order(len(held))
    marked = f"{lines.num_markers} lines of a benchmark's markers are ignored"
    notes = (marked,) if lines.num_markers else ()
    history = sums.history()
    current, further = current_of(held, lines.num_experts)
    file = None
    if current is not None:
        file = PlacementFile(current, layers, meta.num_ranks)
    return LoadFile(
        history, layers, file, meta.num_ranks, meta.num_nodes, meta.model, (*notes, *further)
    )


def current_of(
    held: NDArray[np.int64], num_experts: int
) -> tuple[Placement | None, tuple[str, ...]]:
    """The placement of a map [L, P], or why it is none."""
    complete = all(np.isin(np.arange(num_experts), row).all() for row in held)
    if not complete:  # elastic expert parallelism between two sizes
        return None, ("the last map lacks experts, and is not taken as the current placement",)
    return Placement(held.astype(np.int32), num_experts), ()


def _num_experts(table: NDArray[np.int64], num_redundant: int | None, where: str) -> int:
    if num_redundant is None:
        return min(int(table.max()), table.size) + 1
    num_experts = int(table.shape[1]) - num_redundant
    if num_experts < 1:
        raise HistoryError(f"{where}: {table.shape[1]} slots with {num_redundant} redundant ones")
    return num_experts


def _take_meta(meta: _Meta, record: dict[str, Any], where: str) -> None:
    for name, low in (("num_ranks", 1), ("num_nodes", 1), ("num_layers", 1)):
        if name in record:
            setattr(meta, name, whole_number(record[name], f"{where} {name}", low))
    if "num_redundant_experts" in record:
        found = whole_number(record["num_redundant_experts"], f"{where} num_redundant_experts")
        if meta.num_redundant not in (None, found):
            raise HistoryError(f"{where} has {found} redundant experts, expected --redundant's")
        meta.num_redundant = found
    model = record.get("model", "")
    meta.model = model[:200] if isinstance(model, str) else ""


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


def read_mapping(path: Path, options: ReadOptions) -> PlacementFile:
    """Read the line of an initial mapping."""
    record = decode_json(read_text_bytes(path), max_bytes=MAX_LINE_BYTES)
    kind = member(record, "record_type", str, "the file")
    if kind != MAPPING:
        raise HistoryError(f"the file is {kind[:40]!r}, expected {MAPPING}")
    whole_number(record.get("version"), "version", VERSION, VERSION)
    num_slots = whole_number(member(record, "num_slots", int, "the file"), "num_slots", 1)
    redundant = whole_number(
        member(record, "num_redundant_experts", int, "the file"), "num_redundant_experts"
    )
    given = member(record, "initial_global_assignments", dict, "the file")
    held = _assignments(given, num_slots)
    if redundant >= num_slots:
        raise HistoryError(f"{redundant} redundant experts in {num_slots} slots, expected fewer")
    layers = rows_in_order(len(held))
    return placement_of(held, layers, options, num_experts=num_slots - redundant)


def _assignments(given: dict[str, Any], num_slots: int) -> NDArray[np.int64]:
    """[L, P] from lists by the ordinal of their layer, as text."""
    rows = []
    for ordinal in range(len(given)):
        if str(ordinal) not in given:
            raise HistoryError(
                f"no layer {ordinal}, expected layers 0..{len(given) - 1} in order of MoE layers"
            )
        row = int_array(given[str(ordinal)], 1, f"layer {ordinal}")
        if len(row) != num_slots or row.min() < 0 or row.max() >= num_slots:
            raise HistoryError(
                f"layer {ordinal} has {len(row)} slots with experts {row.min()}..{row.max()}, "
                f"expected {num_slots} slots"
            )
        rows.append(row)
    if not rows:
        raise HistoryError("no layer, expected at least one")
    return np.array(rows)


def write_mapping(file: PlacementFile, num_ranks: int | None) -> tuple[bytes, tuple[str, ...]]:
    """Write the line of an initial mapping."""
    ranks_of(file, num_ranks, "vLLM has as many slots on each rank")
    file, notes = filled(file, num_ranks)
    refuse_dense_rows(file.layers, "rows of vLLM")
    if file.layers.axis == "model":
        notes = (*notes, f"rows are MoE layers in order: row 0 is layer {file.layers.ids[0]}")
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
    return text.encode() + b"\n", (*notes, EXPERIMENTAL)


def write_load(file: LoadFile) -> tuple[bytes, tuple[str, ...]]:
    """Write load lines under the identity map: every expert in its own slot."""
    history = file.history
    identity = [list(range(history.num_experts))] * history.num_layers
    num_ranks = file.num_ranks or 1
    lines: list[dict[str, Any]] = [
        {
            "record_type": META,
            "version": VERSION,
            "model": file.model,
            "num_ranks": num_ranks,
            "num_groups": 1,
            "num_nodes": file.num_nodes or 1,
            "num_layers": history.num_layers,
            "num_redundant_experts": 0,
        }
    ]
    for step, tokens in zip(history.last_step.tolist(), history.tokens.tolist(), strict=True):
        line = {"record_type": STATS, "version": VERSION, "step": step, "num_ranks": num_ranks}
        lines.append(line | {"expert_load": tokens, "p2l_map": identity})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return text.encode(), ("tokens are written as those of one slot for each expert",)
