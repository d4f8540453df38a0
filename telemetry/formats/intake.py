"""The one place where what was read is compared with what is stated, and with itself.

Readers give a file as its format defines it. Here its rows become MoE layers, statements are
compared, and values that have a second reading are refused with the option that decides.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import names_experts, second_reading
from eplb.core.model import spans
from eplb.errors import ConfigError, HistoryError, counted
from telemetry.formats.bounded import MOST_EXACT
from telemetry.formats.engines.omni import is_map, is_map_of_slots, is_pattern
from telemetry.formats.engines.sglang import MAP
from telemetry.formats.types import (
    Layers,
    LoadFile,
    PlacementFile,
    ReadOptions,
    cut_unlike,
    history_of,
    resolve,
    whole_steps,
)

MAKERS = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "trtllm": "TensorRT-LLM",
    "ascend": "vllm-ascend",
    "lmdeploy": "LMDeploy",
    "omni": "omni-infer",
    "ultra": "UltraEP",
}
OPTIONS = {
    "num_experts": ("experts", "--experts, --model or the load"),
    "top_k": ("experts of a token", "--top-k"),
    "num_layers": ("layers", "--num-layers"),
    "num_hidden": ("hidden layers", "--hidden-layers"),
    "num_ranks": ("ranks", "--ranks"),
    "num_redundant": ("redundant experts", "--redundant"),
}
ARRAYS = {"npy", "npz", "counts", "ascend-tensor"}
TABLES = ARRAYS | {"csv", "sglang-counts", "sglang-dump"}  # nothing in them names their axes
ALIKE = 1e-3  # of totals that are equal but for rounding
UNEQUAL = 1.02
FEWEST_SUMS = 4  # totals of windows and layers that are alike by no chance


def reading_of(values: NDArray[np.number], options: ReadOptions) -> str:
    """Which format an array is, by type, shape and values.

    Raises:
        ConfigError: two readings are possible; the message names the option that decides.
        HistoryError: none is.
    """
    if values.dtype.kind not in "iuf" or values.ndim not in (2, 3) or not values.size:
        return "npy"  # whose reader names the shape
    lowest, shape = float(values.min()), f"{values.dtype} {list(values.shape)}"
    why = second_reading(values)
    is_open = values.dtype.kind == "f" or options.num_experts != values.shape[-1]
    if why and "ids" not in why and is_open and not is_pattern(values):
        raise ConfigError(f"{shape} {why}, expected counts, or --format npy where it is load")
    is_stated = options.window_tokens is not None or options.top_k is not None
    counts = lowest >= 0 and not is_stated and options.num_experts in (None, values.shape[-1])
    if counts and is_pattern(values):
        if values.all():
            raise ConfigError(
                f"{shape} is 1 alone: counts, expected --format npy, or a pattern of devices that "
                "hold every expert, --format omni"
            )
        return "omni"
    if values.dtype.kind == "f":
        if not float(values.max()) < MOST_EXACT or np.mod(values, 1).any():
            return "npy"
        values = values.astype(np.int64)
    if is_map(values):
        return "expert-map"
    if is_map_of_slots(values):
        raise ConfigError(
            f"{shape} has each of 0..{values.max()} in every layer: experts by slot; expected a "
            f'placement as JSON, {{"{MAP}": [[...]]}}, routing ids with tokens first, or '
            "--format npy for counts"
        )
    ids = names_experts(values, options.num_experts or 4096)
    if ids:
        sizes = (options.num_layers, options.top_k)
        ids = all(stated in (None, n) for stated, n in zip(sizes, values.shape[1:], strict=True))
    if lowest < 0 and (not ids or values.itemsize > 2):
        raise HistoryError(
            f"{shape} has {lowest:g}, expected counts from 0; -1 is in expert maps, [layers, "
            "ranks, experts] with the slots 0, 1, ... of each rank (--format expert-map; eplb "
            "convert and --current take it), and in routing ids (--format vllm-routing)"
        )
    by_type = values.ndim == 3 and values.itemsize <= 2
    sums = values.sum(axis=-1, dtype=np.float64) if by_type or ids else np.zeros((1, 1))
    if not ids:
        if by_type and counts and not _are_alike(sums, 1):
            raise ConfigError(
                f"{shape} is the type of routing ids, and a row names an expert twice: expected "
                "--format npy for counts; of ids, padding is -1, and a dense layer is left out"
            )
        return "npy"
    if counts and sums.size >= FEWEST_SUMS and sums.shape[1] > 1 and _are_alike(sums, 1):
        return "npy"
    if not counts or by_type:
        return "vllm-routing"
    raise ConfigError(
        f"{shape} may be routing ids [tokens, layers, top-k] of {values.max() + 1} experts or "
        "more, or counts [windows, layers, experts]: expected --experts with the model's number, "
        "--format vllm-routing or --format npy"
    )


def accept(
    file: LoadFile | PlacementFile, name: str, options: ReadOptions, *, is_named: bool = False
) -> LoadFile | PlacementFile:
    """A file that was read, with its MoE layers alone, as far as it agrees with the statements.

    Args:
        file: as its format defines it.
        name: of the format.
        options: what the user states.
        is_named: the user names the format, so that its windows are no counters.

    Raises:
        ConfigError: a statement that the file contradicts, or one that is missing.
        HistoryError: values that no load has.
    """
    maker = MAKERS.get(name.partition("-")[0], "")
    by = f"format {name}{', ' if maker else ''}{maker}"
    layers = replace(file.layers, num_hidden=file.layers.num_hidden or options.num_hidden)
    file = replace(file, layers=layers)
    compare(options, num_ranks=file.num_ranks, num_hidden=layers.num_hidden)
    if isinstance(file, PlacementFile):
        placement = file.placement
        redundant = placement.num_slots - placement.num_experts
        compare(options, num_experts=placement.num_experts, num_redundant=redundant)
        text = (
            f"taken as a placement of {placement.num_experts} experts in {placement.num_slots} "
            f"slots, {by}"
        )
        return replace(file, notes=(text, *file.notes))
    accepted = _accept_load(file, name, by, options)
    is_told = is_named or name not in ARRAYS or options.num_experts is not None
    if not is_told and file.top_k is None and (why := second_reading(file.history.tokens)):
        raise ConfigError(f"the file {why}, expected load, or --format {name} where it is")
    return accepted


def _accept_load(file: LoadFile, name: str, by: str, options: ReadOptions) -> LoadFile:
    history = file.history
    num_experts = history.num_experts
    compare(options, num_experts=num_experts, top_k=file.top_k)
    if options.num_layers not in (None, history.num_layers, file.layers.num_hidden):
        compare(options, num_layers=history.num_layers)
    of_routing = (options.window_tokens, options.layout, options.top_k)
    if file.top_k is None and of_routing != (None, None, None):
        raise ConfigError(
            "windows that are counted already, expected no --window-tokens, --layout or --top-k"
        )
    rows, layers, further = resolve(
        file.layers, options, idle=np.asarray(~history.tokens.any(axis=(0, 2)))
    )
    if len(rows) < history.num_layers:
        history = replace(history, tokens=history.tokens[:, rows])
    what = f"{'load' if file.top_k is None else 'routing ids'} of {num_experts} experts"
    what += "" if file.top_k is None else f", top-{file.top_k}"
    notes = [f"taken as {what}, {by}", *file.notes, *further]
    _check_axes(history.tokens, layers, name, options, notes)
    may_sum = file.top_k is None and not any(history.missing_ranks)
    if may_sum and history.num_windows > options.max_windows:
        each = -(-history.num_windows // options.max_windows)
        starts = np.arange(0, history.num_windows, each)
        notes.append(f"{history.num_windows} windows are summed into {len(starts)}")
        history = history.joined(starts)
    current = file.current
    if current is not None:
        compare(options, num_redundant=current.placement.num_slots - num_experts)
        current = replace(
            current, placement=current.placement.of_layers(np.array(rows)), layers=layers
        )
    return replace(file, history=history, layers=layers, current=current, notes=tuple(notes))


def compare(options: ReadOptions, **values: int | None) -> None:
    """Refuse a file, read or to be written, that another number was stated for.

    Raises:
        ConfigError: with both numbers and the option.
    """
    for name, value in values.items():
        stated = getattr(options, name)
        if None not in (stated, value) and stated != value:
            what, option = OPTIONS[name]
            raise ConfigError(f"the file has {value} {what}, expected {stated} as {option} states")


def _check_axes(
    tokens: NDArray[np.int64],
    layers: Layers,
    name: str,
    options: ReadOptions,
    notes: list[str],
) -> None:
    """Every token passes each layer, so totals of layers are alike, and of no other axis.

    Raises:
        ConfigError: another axis has alike totals, or two layers are one.
    """
    totals = tokens.sum(axis=2)  # [T, L]
    busy = totals.any(axis=0)
    if not busy.any():
        return
    unused = int((~tokens.any(axis=(0, 1))).sum())
    if unused:
        ids = spans(np.flatnonzero(~tokens.any(axis=(0, 1))).tolist())[:80]
        what = counted(unused, "expert")
        notes.append(f"{what} of {tokens.shape[2]} have no token in any layer: {ids}")
    if not busy.all():
        idle = spans([layers.ids[row] for row in np.flatnonzero(~busy).tolist()])
        notes.append(f"layers {idle} have no tokens in any window: their imbalance counts as 1.0")
    kept, totals = tokens[:, busy], totals[:, busy]
    is_stated = (options.num_experts, options.layer_ids) != (None, None) or name not in TABLES
    if not is_stated and layers.axis == "ordinal":
        rows = kept.transpose(1, 0, 2).reshape(len(kept[0]), -1)
        first, times = np.unique(rows, axis=0, return_counts=True)
        twice = first[times > 1]
        if any(row.min() != row.max() for row in twice):
            raise ConfigError(
                f"{times.max()} layers have the same counts {twice[0][:4].tolist()}..., expected "
                "different ones: a row twice, or --layer-ids states the layers"
            )
    is_sum = (2 * kept == kept.sum(axis=2, keepdims=True)).all(axis=(0, 1))
    if not is_stated and is_sum.any() and kept.shape[2] > 2 and totals.size > 1:
        raise ConfigError(
            f"expert {is_sum.argmax()} has as many tokens as all others together, in each layer: a "
            "column of totals, expected experts alone, or --experts with the model's number"
        )
    steps = np.diff(kept, axis=2)
    is_rising = bool(steps.any()) and bool((steps >= 0).all())
    if not is_stated and steps.shape[2] > 4 and totals.size > 1 and is_rising:
        raise ConfigError(
            "no count falls from expert to expert in any layer: cumulative buckets, expected "
            "counts by expert, or --experts with the model's number"
        )
    if _are_alike(totals, 1):
        return
    has_draft = totals.shape[1] > 2 and _are_alike(totals[:, :-1], 1)
    varies = bool((tokens != tokens[:1]).any())
    varies &= (options.layer_ids, options.first_moe_layer, options.num_layers) == (None,) * 3
    others = (  # axes that have alike totals in place of layers, and the option that decides
        (varies and _are_alike(totals, 0), "layers, windows, experts", "layer-ids"),
        (varies and _are_alike(totals.sum(axis=1)[None], 1), "layers, ranks, slots", "layer-ids"),
        (not is_stated and _are_alike(kept.sum(axis=1), 1), "windows, experts, layers", "experts"),
    )
    for is_alike, axes, option in others:
        if is_alike and name in TABLES and not has_draft and kept.shape[2] > 1:
            raise ConfigError(
                f"totals are alike over another axis than layers, as if axes were [{axes}]: "
                f"expected [windows, layers, experts], or --{option} with the model's"
            )
    whole = totals.sum(axis=0)
    if whole.max() > UNEQUAL * whole.min():
        ids = np.array(layers.ids)[busy]
        least, most = ids[whole.argmin()], ids[whole.argmax()]
        lost = f"layer {least} has {whole.min()} tokens, layer {most} {whole.max()}"
        cut_unlike(lost, options.strict)
        why = "the recording may lack a part"
        if has_draft:
            remedy = "its row" if layers.axis == "ordinal" else "it by --layer-ids"
            why += f", or layer {ids[-1]} be a draft (MTP) layer: then leave out {remedy}"
        notes.append(f"{lost}, though each token passes both: {why}")


def _are_alike(totals: NDArray[np.number], axis: int) -> bool:
    """Whether totals [n, m] differ by rounding alone along an axis that has more than one."""
    if totals.shape[axis] < 2:
        return axis == 1
    return bool((np.ptp(totals, axis=axis) <= ALIKE * totals.max(axis=axis)).all())


RANK = re.compile(r"rank[_-]?(\d{1,6})|recorder_[\d.]+_(\d{1,6})\.pt", re.IGNORECASE)
STAGE = re.compile(r"(?:^|[_.-])(?:pp|stage)[_-]?\d", re.IGNORECASE)
Stage = tuple[int, ...]  # numbers of its layers
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def order_of(path: Path) -> tuple[list[float], str]:
    """By the numbers in the name: load_9 before load_10."""
    return [float(number) for number in NUMBER.findall(path.stem[:100])], path.name


def join(
    files: Iterable[tuple[str, LoadFile]],
    options: ReadOptions,
    *,
    what: str = "windows are not in all files",
    by_step: bool = False,
) -> LoadFile:
    """One load from files of a kind, in order of time.

    Files of different layers are of the stages of a pipeline, which stand side by side. Files whose
    names have ranks are summed over ranks. The others follow one another.

    Args:
        files: names and loads, as their formats define them; one is looked at after another.
        options: whether files that are not cut alike are refused.
        what: is said of windows that some files lack.
        by_step: windows of a step are summed, of files with all rows of their stage; else the n-th
            windows of all recordings are.

    Raises:
        HistoryError: other numbers of experts, layers that differ and overlap, or a rank's file is
            missing.
    """
    sums: dict[Stage, dict[int, NDArray[np.int64]]] = {}  # [l, E] by window
    lengths = Counter[tuple[Stage, str]]()  # windows of each stage and rank
    steps: dict[int, tuple[int, int]] = {}  # first and last of each window
    seen, first = Counter[int](), dict[str, Any]()
    names, notes, contents = list[str](), list[str](), set[bytes]()
    for name, part in files:
        history, facts = part.history, _facts_of(part, by_step=by_step)
        first = first or facts
        for fact, value in facts.items():
            if value != first[fact]:
                raise HistoryError(
                    f"{name} has {fact} {value}, expected {first[fact]} as {names[0]}"
                )
        names.append(name)
        notes += part.notes
        contents.add(hashlib.sha256(history.tokens.tobytes()).digest())
        if not (ids := part.layers.ids if by_step else busy_layers(part)):
            continue  # a dump before the engine served
        begin, stage = lengths[ids, rank_in(name)], sums.setdefault(ids, {})
        lengths[ids, rank_in(name)] += history.num_windows
        keys = history.first_step if by_step else begin + np.arange(history.num_windows)
        of_stage = history.tokens[:, np.searchsorted(part.layers.ids, ids)]
        for window, key in enumerate(keys.tolist()):
            stage[key] = stage.get(key, 0) + of_stage[window]
            steps.setdefault(key, (history.first_step[window], history.last_step[window]))
        seen.update(keys.tolist())
    if not sums:
        raise HistoryError(f"{len(names)} files of load, none has tokens, expected load")
    layers = _layers_of_stages(list(sums), names, part.layers)
    ranks = {rank for _, rank in lengths if rank}
    if len(ranks) == 1 and not by_step:
        ranks.clear()  # LMDeploy: one rank counts for all
    if missing := set(map(str, range(len(ranks)))) - ranks:
        raise HistoryError(f"no file of rank {min(missing)}, expected those of ranks 0, 1, 2, ...")
    whole, lost = whole_steps(seen, len(lengths), what, options)
    place = {layer: row for row, layer in enumerate(layers.ids)}
    tokens = np.zeros((len(whole), len(place), history.num_experts), dtype=np.int64)
    for ids, stage in sums.items():
        tokens[:, [place[layer] for layer in ids]] = [stage[key] for key in whole]
    told = list(lost)
    if len(names) > len(lengths):
        windows = counted(len(whole), "window")
        told.append(f"{len(names)} files of one kind: {windows} in order of time")
    if len(sums) > 1:
        told.append(f"{len(sums)} stages are joined by their layers")
    if ranks:
        summed = f"files of ranks 0..{len(ranks) - 1} are summed"
        told.append(f"{summed}: whether one more is missing is not told")
    if alike := len(names) - len(contents):
        told.append(f"{counted(alike, 'file')} of {len(names)} have the same counts as another")
    num_ranks = set(Counter(ids for ids, _ in lengths).values()) if ranks else set[int]()
    return replace(
        part,
        history=history_of(tokens, *zip(*(steps[key] for key in whole), strict=True)),
        layers=layers,
        current=part.current if len(sums) == 1 else None,
        num_ranks=num_ranks.pop() if len(num_ranks) == 1 else part.num_ranks,
        notes=tuple(dict.fromkeys([*told, *notes])),
    )


def _facts_of(part: LoadFile, *, by_step: bool) -> dict[str, Any]:
    """What all files of a recording have in common."""
    facts: dict[str, Any] = {"layer numbers": part.layers.axis, "experts": part.history.num_experts}
    if by_step and part.current is not None:
        facts["map"] = part.current.placement.hash[:12]
    return facts


def _layers_of_stages(stages: list[Stage], names: Sequence[str], last: Layers) -> Layers:
    ids = sorted(layer for stage in stages for layer in stage)
    if len(set(ids)) != len(ids):
        raise HistoryError(
            f"files have layers {' and '.join(map(spans, stages[:2]))}, expected the same, or "
            "stages without a common layer"
        )
    if last.axis == "ordinal" and any(STAGE.search(name) for name in names):
        raise HistoryError(
            "files of stages have rows in order, expected numbers of layers: read each with "
            "--layer-ids and convert it"
        )
    is_whole = last.axis == "hidden" and last.num_hidden is not None
    return replace(last, ids=tuple(range(last.num_hidden or 0) if is_whole else ids))


def busy_layers(file: LoadFile) -> tuple[int, ...]:
    """The layers of a file; where rows are hidden layers those with tokens."""
    busy = file.history.tokens.any(axis=(0, 2)) | (file.layers.axis != "hidden")
    return tuple(np.array(file.layers.ids)[busy].tolist())


def rank_in(name: str) -> str:
    """The rank in the name of a file; "": there is none."""
    rank = RANK.search(name)
    return str(int(rank[1] or rank[2])) if rank else ""
