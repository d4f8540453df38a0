"""SGLang: dumps of the expert distribution recorder, and ``--init-expert-location``.

Rows are all hidden layers of the model, dense ones included, in dumps and in locations. A dump of
the modes stat and stat_approx is one file, whose steps stand in a circular buffer: their order is
not known. In the modes per_pass and per_token each rank writes a file of its own part: passes are
summed over the files of a dump.

Source: sglang 0.5.23, ``python/sglang/srt/eplb/expert_distribution.py`` and ``expert_location.py``.

Shapes:  n passes, T windows, L hidden layers, E experts, P physical slots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history, repeats_expert
from eplb.core.placement import Placement
from eplb.errors import HistoryError
from telemetry.formats.bounded import (
    int_array,
    member,
    read_json,
    to_json,
    whole_array,
    whole_number,
)
from telemetry.formats.repairs import filled
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import (
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    StepSums,
    check_cells,
    cut_unlike,
    model_layers,
    placement_of,
    rows_as_hidden,
    summed_windows,
    to_logical,
)

MAP = "physical_to_logical_map"
COUNT = "logical_count"
MAX_RANK_FILES = 4096
DUMP_FILE = re.compile(r"expert_distribution_recorder_(?P<time>[\d.]+?)(?:_(?P<rank>\d+))?\.pt")
CIRCULAR = "steps stand in a circular buffer: which window is the newest is not known"


def of_dump(found: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of a recorder's file that was read already."""
    if isinstance(found, dict) and COUNT in found:
        return _stat(found[COUNT], options, (CIRCULAR,))
    if isinstance(found, dict) and "records" in found:
        note = f"of one rank alone, {path.name}: the folder of all ranks' files gives their sum"
        return read_rank_files([path], options, {path: found}, (note,))
    keys = ", ".join(map(str, found))[:80] if isinstance(found, dict) else ""
    raise HistoryError(
        f"found a {type(found).__name__} {keys}, expected a dump of SGLang's recorder with "
        f"{COUNT} or records, a {MAP}, or one tensor [layers, experts]"
    )


def read_counts(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``{"logical_count": ...}`` as ``--init-expert-location`` takes it."""
    counts = member(read_json(path), COUNT, list, "the file")
    return _stat(int_array(counts, (2, 3), COUNT), options, ())


def _stat(counts: Any, options: ReadOptions, notes: tuple[str, ...]) -> LoadFile:
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "iuf" or not counts.size:
        raise HistoryError(f"{COUNT} is no table of numbers, expected [steps, layers, experts]")
    steps = counts[None] if counts.ndim == 2 else counts
    if steps.ndim != 3:
        raise HistoryError(f"{COUNT} has shape {counts.shape}, expected [steps, layers, experts]")
    if steps.dtype.kind == "f":
        steps = as_history(steps).tokens
    last_filled = _last_filled(steps)
    if last_filled < len(steps):
        notes = (*notes, f"{len(steps) - last_filled} of {len(steps)} steps are not filled yet")
        steps = steps[:last_filled]
    tokens, each = summed_windows(steps, options.max_windows)
    first = np.arange(len(tokens)) * each
    last = np.minimum(first + each, len(steps)) - 1
    layers = rows_as_hidden(tokens.shape[1])
    return LoadFile(LoadHistory(tokens, first, last), layers, notes=notes)


def _last_filled(steps: NDArray[Any]) -> int:
    """Number of steps up to the last one with tokens; at least 1."""
    for last in range(len(steps), 0, -1):
        if steps[last - 1].any():
            return last
    return 1


def dumps_in(paths: list[Path], *, strict: bool) -> tuple[list[list[Path]], tuple[str, ...]]:
    """Files of each dump by rank, in order of time, and a note on those of no whole dump.

    The n-th file of every rank is of the n-th dump; a file without a rank is a dump.
    """
    by_rank: dict[int, list[tuple[float, Path]]] = {}
    for path in paths:
        name = DUMP_FILE.fullmatch(path.name)
        assert name is not None, "files of the recorder alone"
        time = name["time"].replace(".", "", name["time"].count(".") - 1)
        by_rank.setdefault(int((name["rank"] or "-1")[:9]), []).append((float(time), path))
    if alone := by_rank.pop(-1, []):
        if by_rank:
            raise HistoryError("files of one rank and of all ranks, expected those of one mode")
        return [[path] for _, path in sorted(alone)], ()
    missing = sorted(set(range(max(by_rank) + 1)) - by_rank.keys())
    if missing or len(paths) > MAX_RANK_FILES:
        raise HistoryError(
            f"{len(paths)} files, none of rank {missing or MAX_RANK_FILES}, expected ranks "
            f"0..{max(by_rank)}"
        )
    count = min(map(len, by_rank.values()))
    spare = len(paths) - count * len(by_rank)
    notes = (
        cut_unlike(f"{spare} files are of dumps that not all ranks have", strict) if spare else ()
    )
    whole = [sorted(by_rank[rank])[:count] for rank in sorted(by_rank)]
    return [[files[number][1] for files in whole] for number in range(count)], notes


def read_rank_files(
    paths: list[Path],
    options: ReadOptions,
    loaded: dict[Path, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> LoadFile:
    """Read the files of all ranks of one dump, by rank, and sum their passes."""
    held: NDArray[np.int64] | None = None
    sums: dict[int, NDArray[np.int64]] = {}  # by pass
    seen: dict[int, int] = {}  # files that have it
    for path in paths:
        of_file = set[int]()
        record = loaded[path] if loaded else load_torch(path)
        last = member(record, f"last_{MAP}", np.ndarray, path.name)
        table = _checked_map(last, f"{path.name}: the map")
        if held is not None and not np.array_equal(held, table):
            raise HistoryError(f"{path.name} has another map than rank 0, expected one dump")
        held = table
        for number, slots in _passes(record, table, path.name):
            if number in of_file:
                raise HistoryError(f"{path.name} has pass {number} twice, expected it once")
            of_file.add(number)
            sums[number] = sums.get(number, 0) + slots
            seen[number] = seen.get(number, 0) + 1
    whole = sorted(number for number, count in seen.items() if count == len(paths))
    if held is None or not whole:
        raise HistoryError("no records, expected passes that all files have")
    if len(whole) < len(seen):
        lost = f"{len(seen) - len(whole)} of {len(seen)} passes are not in all {len(paths)} files"
        notes = (*notes, *cut_unlike(lost, options.strict))
    num_experts = options.experts_in(held.shape[1], int(held.max()))
    folded = StepSums(options.max_windows)
    for number in whole:
        folded.add(number, to_logical(sums[number], held, num_experts, f"pass {number}"))
    only_last = (
        "the map is the last one: passes before a rebalance within this recording would be wrong"
    )
    layers = rows_as_hidden(len(held))
    current = PlacementFile(Placement(held.astype(np.int32), num_experts), layers)
    num_ranks = len(paths) if len(paths) > 1 else None
    return LoadFile(folded.history(), layers, current, num_ranks, notes=(*notes, only_last))


def _checked_map(table: NDArray[Any], where: str) -> NDArray[np.int64]:
    """[L, P] experts of slots; every slot holds one."""
    num_slots = table.shape[-1] if table.ndim else 0
    found: NDArray[np.int64] = whole_array(
        table, (None, None), where, high=max(num_slots - 1, 0)
    ).astype(np.int64)
    if not found.size:
        raise HistoryError(f"{where} has shape {table.shape}, expected layers and slots")
    return found


def _passes(
    record: Any, held: NDArray[np.int64], where: str
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Number and tokens [L, P] of each forward pass of one rank."""
    for index, one in enumerate(member(record, "records", list, where)):
        place = f"{where} record {index}"
        number = whole_number(member(one, "forward_pass_id", int, place), place, 0, 2**62)
        key = one.get("gatherer_key", "primary")
        if key != "primary":
            continue  # a second gatherer counts the same tokens of a draft model or of a phase
        slots = one.get("global_physical_count")
        if slots is None:
            slots = _counted(member(one, "topk_ids_of_layer", np.ndarray, place), held, place)
        slots = whole_array(slots, held.shape, f"{place}: global_physical_count")
        yield number, slots.astype(np.int64)


def _counted(ids: NDArray[Any], held: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """[L, P] from the slots of single tokens [L, tokens, 8], padded with -1: older releases."""
    num_layers, num_slots = held.shape
    shape = (num_layers, None, None)
    ids = whole_array(ids, shape, f"{where}: topk_ids_of_layer", low=-1, high=num_slots - 1)
    check_cells(num_layers, num_slots, held.nbytes)
    if (wrong := repeats_expert(ids)) is not None:
        raise HistoryError(f"{where}: token {wrong[1]} of row {wrong[0]} has a slot twice")
    counts = [
        np.bincount(row.ravel().astype(np.int64) + 1, minlength=num_slots + 1)[1:] for row in ids
    ]
    return np.array(counts, dtype=np.int64)


# -- expert locations


def read_location(path: Path, options: ReadOptions) -> PlacementFile:
    """Read ``{"physical_to_logical_map": ...}`` of a JSON file."""
    return of_location(read_json(path), path, options)


def of_location(record: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of a map that was read already."""
    table = member(record, MAP, (list, np.ndarray), "the file")
    given = table if isinstance(table, np.ndarray) else int_array(table, 2, MAP)
    held = _checked_map(given, MAP)
    return placement_of(held, rows_as_hidden(len(held)), options)


def write_location(
    file: PlacementFile, num_ranks: int | None, num_hidden: int | None
) -> tuple[bytes, tuple[str, ...]]:
    """Write the map of all hidden layers, and no other key: the engine refuses any other.

    Rows of dense layers hold experts in order: the engine asks for a full row and never uses it.
    """
    file, notes = filled(file, num_ranks)
    held = file.placement.slot_to_expert
    layers = file.layers
    if layers.axis == "hidden":
        return to_json({MAP: held.tolist()}), notes
    layers = model_layers(layers, "rows of SGLang are all hidden layers")
    total = num_hidden if num_hidden is not None else layers.num_hidden
    if total is None:
        total = layers.ids[-1] + 1
        notes = (*notes, f"{total} hidden layers are assumed, up to the last MoE layer")
    Layers(layers.ids, "model", total)  # checks that all are below
    in_order = np.arange(file.placement.num_slots) % file.placement.num_experts
    rows = np.tile(in_order, (total, 1))
    rows[list(layers.ids)] = held
    dense = total - len(layers.ids)
    if dense:
        notes = (*notes, f"{dense} rows of dense layers hold experts in order")
    return to_json({MAP: rows.tolist()}), notes
