"""What every reader returns and every writer takes: load or a placement, with its layers named.

Engines number layers in three ways. Rows are taken for layer numbers only where the format
defines it; where numbers are needed and are not known, they are asked for.

Shapes:  T windows, L MoE layers, E experts, P physical slots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape, spans
from eplb.core.placement import Placement
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import int_array, whole_array

# model: ids are the model's layer numbers, MoE layers alone; hidden: row i is layer i of the model,
# and some rows may be dense layers; ordinal: row i is the i-th MoE layer.
Axis = Literal["model", "hidden", "ordinal"]
Layout = Literal["layers-first", "tokens-first"]
DEFAULT_WINDOWS = 64
MOST_LAYERS = 512  # of a model; more rows are another axis
MOST_DENSE = 8  # layers before the first MoE layer; known models have up to 4
MOST_CELLS = 2**27  # of a window [L, E]; 61 x 384 are 23,424


@dataclass(frozen=True)
class Layers:
    """Numbers of the rows of a file."""

    ids: tuple[int, ...]  # [L], rising
    axis: Axis
    num_hidden: int | None = None  # layers of the model, dense ones included; None: not known

    def __post_init__(self) -> None:
        rises = all(one < two for one, two in zip(self.ids, self.ids[1:], strict=False))
        if not self.ids or not rises or self.ids[0] < 0:
            raise ConfigError(f"layer ids are {_shown(self.ids)}, expected rising numbers from 0")
        if self.num_hidden is not None and self.ids[-1] >= self.num_hidden:
            raise ConfigError(
                f"layer {self.ids[-1]} of a model of {self.num_hidden} layers, expected layers "
                f"0..{self.num_hidden - 1}"
            )


@dataclass(frozen=True)
class ReadOptions:
    """What a user states about a file beside its path."""

    layer_ids: tuple[int, ...] | None = None  # the model's MoE layers
    first_moe_layer: int | None = None  # in place of layer_ids: all layers from this one on
    max_windows: int = DEFAULT_WINDOWS  # steps are summed into at most so many windows
    num_experts: int | None = None
    num_redundant: int | None = None
    window_tokens: int | None = None  # of per-request routing
    num_layers: int | None = None  # of raw routing, whose bytes have no shape
    top_k: int | None = None  # as num_layers
    deployment: str = "demo"  # of our own store
    model: str = ""  # name of the model whose layers are stated; "": the user states them
    num_ranks: int | None = None  # of the group that recorded, or that a placement is for
    num_hidden: int | None = None  # layers of the model, dense ones included
    layout: Layout | None = None  # of ``expert_ids``, where the file does not tell
    strict: bool = False  # recordings that are not cut alike are refused

    def __post_init__(self) -> None:
        if self.layer_ids is not None and self.first_moe_layer is not None:
            raise ConfigError("layer ids and a first MoE layer are given, expected one of them")
        least = {"max_windows": 1, "num_experts": 1, "num_redundant": 0, "first_moe_layer": 0}
        least |= {"num_layers": 1, "top_k": 1, "window_tokens": 1, "num_ranks": 1, "num_hidden": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}, expected {low} or more")

    def experts_in(self, where: str, largest: int, num_slots: int | None = None) -> int:
        """E of a file whose largest id is given: as stated, by its slots, else one more.

        Raises:
            HistoryError: an id that so many experts do not have.
            ConfigError: more experts are stated than a map has slots.
        """
        stated = self.num_experts
        if stated is not None and num_slots is not None and stated > num_slots:
            raise ConfigError(f"{num_slots} slots, expected --experts {stated} or more")
        if stated is None and num_slots is not None and self.num_redundant is not None:
            stated = num_slots - self.num_redundant
        if stated is not None and largest >= stated:
            raise HistoryError(f"{where} names expert {largest}, expected 0..{stated - 1}")
        return stated or largest + 1


@dataclass(frozen=True, eq=False)
class PlacementFile:
    """A placement with the numbers of its layers."""

    placement: Placement
    layers: Layers
    num_ranks: int | None = None  # None: the file does not tell
    model: str = ""
    notes: tuple[str, ...] = ()  # what was assumed, dropped or repaired
    provenance: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready


@dataclass(frozen=True, eq=False)
class LoadFile:
    """Windows of load with the numbers of their layers."""

    history: LoadHistory
    layers: Layers
    current: PlacementFile | None = None  # the last map in the file; its rows are those of history
    num_ranks: int | None = None
    num_nodes: int | None = None
    model: str = ""
    notes: tuple[str, ...] = ()
    shape: ModelShape | None = None  # None: the source does not tell, as the next one
    window_s: float | None = None  # serving time of a window
    top_k: int | None = None  # of routing ids; None: the file holds counts


@dataclass(frozen=True, eq=False)
class WriteOptions:
    """What a writer may need beside what is written."""

    num_ranks: int | None = None
    num_hidden: int | None = None  # layers of the model, dense ones included
    current: PlacementFile | None = None  # the map that serves
    provenance: Mapping[str, Any] = field(default_factory=dict)


Written = tuple[bytes, tuple[str, ...]]  # of a file, and what was repaired or is lost


def resolve(
    layers: Layers, options: ReadOptions, *, idle: NDArray[np.bool_] | None = None
) -> tuple[list[int], Layers, tuple[str, ...]]:
    """Which rows of a file are MoE layers, and their numbers: the one rule for all formats.

    Rows without tokens before the first one with tokens are dense layers where rows are hidden
    layers. Any other row without tokens has two readings, which the user decides.

    Args:
        layers: as the format defines its rows.
        options: what the user states.
        idle: [L] rows without tokens, for load.

    Returns:
        Indices of the rows, their layers, and notes.

    Raises:
        ConfigError: a statement that does not fit the file, or that is missing.
    """
    ids, num_rows = layers.ids, len(layers.ids)
    if num_rows > MOST_LAYERS:
        raise HistoryError(f"found {num_rows} layers, expected at most {MOST_LAYERS}")
    stated = _stated(layers, options)
    empty = [] if idle is None else [ids[row] for row in np.flatnonzero(idle).tolist()]
    if len(empty) == num_rows:
        if layers.axis == "hidden":
            raise HistoryError("no layer has tokens, expected load")
        empty = []  # an idle recording, which whoever plans on it refuses
    if stated is None:
        return _unstated(layers, empty, is_load=idle is not None)
    if layers.axis == "ordinal" and len(stated) == num_rows:
        return list(range(num_rows)), Layers(stated, "model", layers.num_hidden), ()
    dropped = sorted(set(ids) - set(stated))
    if layers.axis == "ordinal" and (idle is None or dropped != empty):
        raise ConfigError(
            f"the file has {num_rows} layers, expected {len(stated)}: {_shown(stated)}"
            f"{_of_model(options)}"
        )
    missing = sorted(set(stated) - set(ids))
    if missing:
        raise ConfigError(
            f"layers {_shown(missing)} are not in the file, expected some of {_shown(ids)}"
            f"{_of_model(options)}"
        )
    busy = [layer for layer in dropped if layer not in empty and idle is not None]
    notes = (f"layers {_shown(dropped)} are dropped as stated",) if dropped else ()
    if busy and options.model:
        if busy[0] < stated[-1]:
            why = f"layers {_shown(busy)} have tokens, expected none"
            raise ConfigError(f"{why}{_of_model(options)}")
        notes = (*notes, f"layers {_shown(busy)} have tokens: taken as draft (MTP) layers")
    place = {layer: row for row, layer in enumerate(ids)}
    return [place[layer] for layer in stated], Layers(stated, "model", layers.num_hidden), notes


def _unstated(
    layers: Layers, empty: list[int], *, is_load: bool
) -> tuple[list[int], Layers, tuple[str, ...]]:
    """As ``resolve``, where the user states no layers; ``empty`` ones have no tokens."""
    ids, rows = layers.ids, list(range(len(layers.ids)))
    if layers.axis == "model":
        return rows, layers, ()
    first = next((layer for layer in ids if layer not in empty), ids[0])
    may_be_dense = layers.axis == "hidden" and first <= MOST_DENSE
    unclear = [layer for layer in empty if layer > first or not may_be_dense]
    if unclear:
        raise ConfigError(
            f"layers {_shown(unclear)} have no tokens, and layer {first} has: dense layers, or "
            "those of another stage; expected --layer-ids with the MoE layers"
        )
    if layers.axis == "ordinal":
        return rows, layers, ("layer numbers are not in the file; rows are MoE layers in order",)
    if not is_load:
        return rows, layers, ()
    note = f"layers {_shown(empty)} have no tokens: taken as dense and dropped"
    kept = [row for row in rows if ids[row] not in empty]
    found = Layers(tuple(ids[row] for row in kept), "model", layers.num_hidden)
    return kept, found, (note,) if empty else ()


def _of_model(options: ReadOptions) -> str:
    """The end of a refusal of layers that ``--model`` states."""
    if not options.model or options.layer_ids is None:
        return ""
    return (
        f"; --model {options.model} has MoE layers {_shown(options.layer_ids)}: the file is of "
        "another model, or --layer-ids states its layers"
    )


def _stated(layers: Layers, options: ReadOptions) -> tuple[int, ...] | None:
    if options.layer_ids is not None:
        return Layers(tuple(options.layer_ids), "model").ids
    first = options.first_moe_layer
    if first is None:
        return None
    if layers.axis == "ordinal":
        return tuple(range(first, first + len(layers.ids)))
    stated = tuple(layer for layer in layers.ids if layer >= first)
    if not stated:
        raise ConfigError(f"the first MoE layer is {first}, the last in the file {layers.ids[-1]}")
    return stated


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """Read ``3-60`` or ``1,2,5-7``.

    Raises:
        ConfigError: anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not all(
            one.isdecimal() and len(one) < 6 for one in ([first, last] if dash else [first])
        ):
            raise ConfigError(f"layer ids are {text!r}, expected numbers and ranges as 0,3-60")
        low, high = int(first), int(last if dash else first)
        if high - low >= MOST_LAYERS:
            raise ConfigError(f"layer ids {part!r} are more than {MOST_LAYERS} layers")
        found += range(low, high + 1)
    return Layers(tuple(found), "model").ids


def history_of(tokens: ArrayLike, first: ArrayLike, last: ArrayLike) -> LoadHistory:
    """Windows [T, L, E] with their steps [T]; after a restart, which begins at step 0, in order."""
    steps = np.stack((first, last), axis=1).astype(np.int64)
    if (np.diff(steps.ravel()) < 0).any():
        return LoadHistory(np.asarray(tokens))
    return LoadHistory(np.asarray(tokens), steps[:, 0], steps[:, 1])


def whole_steps(
    seen: Counter[int], num_parts: int, what: str, options: ReadOptions
) -> tuple[list[int], tuple[str, ...]]:
    """Steps that all parts of a recording have, in order, and a note on the others.

    Args:
        seen: in how many parts (of ranks, stages or layers) each step is.
        num_parts: of the recording.
        what: steps, and the parts: passes are not in all files.

    Raises:
        HistoryError: no step is in all, or the user asked for recordings that are cut alike.
    """
    whole = sorted(step for step, times in seen.items() if times == num_parts)
    lost = f"{len(seen) - len(whole)} of {len(seen)} {what}"
    if not whole:
        raise HistoryError(f"{lost}, expected some that are")
    return whole, cut_unlike(lost, options.strict) if len(whole) < len(seen) else ()


def to_logical(
    physical: NDArray[np.integer], held: NDArray[np.integer], num_experts: int, where: str
) -> NDArray[np.int64]:
    """[L, E] tokens of experts from tokens of slots [L, P], by the map [L, P]; -1 holds nothing.

    Raises:
        HistoryError: an id out of range, negative tokens, or tokens in an empty slot.
    """
    if physical.shape != held.shape or physical.ndim != 2:
        raise HistoryError(
            f"{where}: tokens have shape {physical.shape} and the map {held.shape}, expected the "
            "same [layers, slots]"
        )
    if physical.size and int(physical.min()) < 0:
        raise HistoryError(f"{where}: {physical.min()} tokens in a slot, expected 0 or more")
    if held.size and not (held.min() >= -1 and held.max() < num_experts):
        raise HistoryError(
            f"{where}: the map names experts {held.min()}..{held.max()}, expected "
            f"-1..{num_experts - 1}"
        )
    if ((held == -1) & (physical != 0)).any():
        raise HistoryError(f"{where}: tokens in a slot without an expert, expected none")
    num_layers = len(held)
    check_cells(where, (num_layers, num_experts), held.nbytes + physical.nbytes)
    tokens = np.zeros((num_layers, num_experts + 1), dtype=np.int64)
    np.add.at(tokens, (np.arange(num_layers)[:, None], held), physical.astype(np.int64))
    return tokens[:, :num_experts]


def check_cells(where: str, shape: tuple[int, ...], num_bytes: int) -> None:
    """Refuse counts that would take far more memory than the file that they come from.

    Raises:
        HistoryError: a number of experts that so small a file has no use for.
    """
    if (cells := math.prod(shape)) > MOST_CELLS or cells > max(2**21, 4 * num_bytes):
        raise HistoryError(
            f"{where}: counts of {' x '.join(map(str, shape))} (the last are experts) from "
            f"{num_bytes} bytes, expected fewer"
        )


def ranks_summed(num_files: int) -> str:
    """The note on files of ranks: nothing in them tells how many there are."""
    return f"files of ranks 0..{num_files - 1} are summed: whether one more is missing is not told"


def cut_unlike(lost: str, strict: bool) -> tuple[str, ...]:
    """The note on a part of a recording that others lack; the rest is used.

    Raises:
        HistoryError: the user asked for whole recordings.
    """
    if strict:
        raise HistoryError(f"{lost}, expected recordings that are cut alike (--strict)")
    return (f"{lost}: not used",)


def assignments(given: Any, layers: Sequence[Any], num_slots: int) -> NDArray[np.int64]:
    """[L, P] from lists of experts by layer, all of ``layers``.

    Raises:
        HistoryError: no such lists, or a layer without one.
    """
    if not isinstance(given, dict) or not given or given.keys() != set(layers):
        shown = ", ".join(map(str, given))[:40] if isinstance(given, dict) else "none"
        raise HistoryError(
            f"initial_global_assignments of layers {shown or 'none'}, expected lists of experts by "
            f"layer {', '.join(map(str, layers))[:40]}"
        )
    held = int_array([given[layer] for layer in layers], 2, "initial_global_assignments")
    if held.shape[1] != num_slots:
        raise HistoryError(
            f"layers have {held.shape[1]} experts, expected {num_slots} as num_slots"
        )
    return held


def placement_of(
    held: NDArray[np.integer],
    layers: Layers,
    options: ReadOptions,
    *,
    is_full: bool = True,
    num_experts: int | None = None,
    generation: int = 0,
    shares: Mapping[str, NDArray[np.float64]] | None = None,
    **more: Any,
) -> PlacementFile:
    """A placement of the MoE rows of a map [L, P]; -1 is an empty slot.

    Args:
        is_full: the format has no empty slots.
        num_experts: where the format has it.
        shares: of slots, and of slots by source; [..., L, P].
        more: other fields of the file.
    """
    num_slots = held.shape[1]
    if held.min() < (0 if is_full else -1) or held.max() >= num_slots:
        raise HistoryError(
            f"experts {held.min()}..{held.max()} in {num_slots} slots of a layer, expected "
            f"{0 if is_full else -1}..{num_slots - 1}"
        )
    num_experts = num_experts or options.experts_in("the map", int(held.max()), num_slots)
    rows, known, notes = resolve(layers, options)
    kept = {name: table[..., rows, :] for name, table in (shares or {}).items()}
    placement = Placement(held[rows].astype(np.int32), num_experts, generation, **kept)
    return PlacementFile(placement, known, notes=(*more.pop("notes", ()), *notes), **more)


def _shown(ids: Sequence[int]) -> str:
    """Numbers as the options take them: 0-2, 5."""
    shown = spans(ids).replace("..", "-").split(", ")
    return ", ".join(shown[:8] + ["..."] * (len(shown) > 8)) or "none"


def as_layers(ids: Sequence[int]) -> Layers:
    """Layers that a file numbers itself."""
    return Layers(tuple(ids), "model")


def numbered_layers(ids: Any, num_rows: int) -> Layers:
    """Layers of a table by the numbers in its file; None: rows are MoE layers in order."""
    if ids is None:
        return rows_in_order(num_rows)
    numbers = whole_array(np.asarray(ids), (num_rows,), "layer_ids", high=2**16)
    return as_layers(numbers.tolist())


def rows_in_order(num_rows: int) -> Layers:
    """Layers of a format whose row i is the i-th MoE layer."""
    return Layers(tuple(range(num_rows)), "ordinal")


def rows_as_hidden(num_rows: int) -> Layers:
    """Layers of a format whose row i is layer i of the model, dense ones included."""
    return Layers(tuple(range(num_rows)), "hidden", num_rows)
