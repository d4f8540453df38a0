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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import history_of_figures, repeats_expert
from eplb.core.placement import Placement
from eplb.errors import HistoryError
from telemetry.formats.bounded import (
    int_array,
    member,
    reading,
    to_json,
    whole_array,
    whole_number,
)
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import (
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    WriteOptions,
    Written,
    check_cells,
    cut_unlike,
    history_of,
    placement_of,
    ranks_summed,
    rows_as_hidden,
    to_logical,
    whole_steps,
)

MAP = "physical_to_logical_map"
COUNT = "logical_count"
MAX_RANK_FILES = 4096
DUMP_FILE = re.compile(r"expert_distribution_recorder_(?P<time>[\d.]+?)(?:_(?P<rank>\d+))?\.pt")
CIRCULAR = "steps stand in a circular buffer: which window is the newest is not known"


def of_dump(record: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of a recorder's file that was read already."""
    if isinstance(record, dict) and COUNT in record:
        counts = record[COUNT]
        if isinstance(counts, list):  # as ``--init-expert-location`` takes it
            return _stat(int_array(counts, (2, 3), COUNT), ())
        return _stat(counts, (CIRCULAR,))
    if isinstance(record, dict) and "records" in record:
        note = f"of one rank alone, {path.name}: the folder of all ranks' files gives their sum"
        return _sum_of_ranks({path.name: lambda: record}, options, (note,))
    keys = ", ".join(map(str, record))[:80] if isinstance(record, dict) else ""
    raise HistoryError(
        f"found a {type(record).__name__} {keys}, expected a dump of SGLang's recorder with "
        f"{COUNT} or records, a {MAP}, or one tensor [layers, experts]"
    )


def _stat(counts: Any, notes: tuple[str, ...]) -> LoadFile:
    if not isinstance(counts, np.ndarray) or counts.ndim not in (2, 3) or not counts.size:
        shape = getattr(counts, "shape", type(counts).__name__)
        raise HistoryError(f"{COUNT} has shape {shape}, expected [steps, layers, experts]")
    steps = history_of_figures(counts)
    last_filled = int(np.flatnonzero(steps.tokens.any(axis=(1, 2))).max(initial=0)) + 1
    if last_filled < steps.num_windows:
        unfilled = steps.num_windows - last_filled
        notes = (*notes, f"{unfilled} of {steps.num_windows} steps are not filled yet")
    history = steps.of_windows(np.arange(last_filled))
    return LoadFile(history, rows_as_hidden(history.num_layers), notes=notes)


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


def read_rank_files(paths: Sequence[Path], options: ReadOptions) -> LoadFile:
    """Read the files of all ranks of one dump, by rank, and sum their passes."""
    return _sum_of_ranks({path.name: partial(_loaded, path) for path in paths}, options, ())


def _loaded(path: Path) -> Any:
    with reading(path, "a dump of SGLang's recorder"):
        return load_torch(path)


def _sum_of_ranks(
    files: Mapping[str, Callable[[], Any]], options: ReadOptions, notes: tuple[str, ...]
) -> LoadFile:
    """The sum of the passes that all files have, which are loaded one after another."""
    held: NDArray[np.int64] | None = None
    sums: dict[int, NDArray[np.int64]] = {}  # by pass
    seen = Counter[int]()  # files that have it
    for name, load in files.items():
        record = load()
        table = _checked_map(member(record, f"last_{MAP}", np.ndarray, name), f"{name}: the map")
        if held is not None and not np.array_equal(held, table):
            raise HistoryError(f"{name} has another map than rank 0, expected one dump")
        held, of_file = table, set[int]()
        for number, slots in _passes(record, table, name):
            if number in of_file:
                raise HistoryError(f"{name} has pass {number} twice, expected it once")
            of_file.add(number)
            sums[number] = sums.get(number, 0) + slots
        seen.update(of_file)
    assert held is not None, "a dump has files"
    what = f"passes are not in all {len(files)} files"
    whole, lost = whole_steps(seen, len(files), what, options)
    num_experts = options.experts_in("the map", int(held.max()), held.shape[1])
    tokens = [to_logical(sums[one], held, num_experts, f"pass {one}") for one in whole]
    only_last = (
        "the map is the last one: passes before a rebalance within this recording would be wrong"
    )
    layers = rows_as_hidden(len(held))
    current = PlacementFile(Placement(held.astype(np.int32), num_experts), layers)
    return LoadFile(
        history_of(tokens, whole, whole),
        layers,
        current,
        len(files) if len(files) > 1 else None,
        notes=(*notes, *lost, *([ranks_summed(len(files))] if len(files) > 1 else []), only_last),
    )


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
    check_cells(where, (num_layers, num_slots), held.nbytes)
    if (wrong := repeats_expert(ids)) is not None:
        raise HistoryError(f"{where}: token {wrong[1]} of row {wrong[0]} has a slot twice")
    counts = [
        np.bincount(row.ravel().astype(np.int64) + 1, minlength=num_slots + 1)[1:] for row in ids
    ]
    return np.array(counts, dtype=np.int64)


# -- expert locations


def of_location(record: Any, path: Path, options: ReadOptions) -> PlacementFile:
    """The placement of a map that was read already."""
    table = member(record, MAP, (list, np.ndarray), "the file")
    given = table if isinstance(table, np.ndarray) else int_array(table, 2, MAP)
    held = _checked_map(given, MAP)
    return placement_of(held, rows_as_hidden(len(held)), options)


def write_location(file: PlacementFile, options: WriteOptions) -> Written:
    """Write the map of all hidden layers, and no other key: the engine refuses any other.

    Rows of dense layers hold experts in order: the engine asks for a full row and never uses it.
    """
    held, layers, notes = file.placement.slot_to_expert, file.layers, tuple[str, ...]()
    if layers.axis == "hidden":
        return to_json({MAP: held.tolist()}), ()
    total = options.num_hidden or layers.num_hidden
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
