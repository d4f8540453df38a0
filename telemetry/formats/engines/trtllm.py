"""TensorRT-LLM: the folder of expert statistics, and ``moe_load_balancer.yaml``.

Layers have the model's numbers. Statistics are a file for each rank with the tokens that it routed,
by ``ITERATION_LAYER``; the sum of all ranks is the load.

Source: ``tensorrt_llm/_torch/expert_statistic.py`` and ``MoeLoadBalancerConfig``.

Shapes:  L MoE layers, E experts, P slots.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from eplb.core.placement import Placement
from eplb.errors import HistoryError
from telemetry.formats.bounded import (
    check_regular,
    check_whole,
    member,
    read_json,
    read_text_bytes,
    whole_number,
)
from telemetry.formats.repairs import filled, ranks_of
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    StepSums,
    as_layers,
    check_cells,
    model_layers,
    resolve,
)

RANK_FILE = re.compile(r"rank(\d{1,5})\.safetensors")  # not rank0_raw.safetensors
KEY = re.compile(r"(\d{1,12})_(\d{1,5})")
NUMBER = re.compile(r"\d{1,9}")
MAX_DEPTH = 4
MAX_EVENTS = 4_000_000  # 1,024 layers x 1,024 slots take 1,100,000
SETTINGS = {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}


def read_statistics(folder: Path, options: ReadOptions) -> LoadFile:
    """Read the folder that ``EXPERT_STATISTIC_PATH`` names."""
    meta = read_json(folder / "meta_info.json")
    num_experts = whole_number(
        member(meta, "num_experts", int, "meta_info.json"), "num_experts", 1, 2**20
    )
    files = _rank_files(folder)
    total: dict[str, NDArray[np.int64]] = {}
    for rank, path in enumerate(files):
        counts = _counts(path, num_experts)
        if rank and counts.keys() != total.keys():
            odd = min(counts.keys() ^ total.keys())
            raise HistoryError(f"{path.name}: {odd!r} is not in all ranks' files")
        for key, tokens in counts.items():
            total[key] = total[key] + tokens if rank else tokens
    steps, ids = _axes(total)
    check_cells(len(ids), num_experts, sum(one.nbytes for one in total.values()))
    sums = StepSums(options.max_windows)
    for step in steps:
        sums.add(step, np.array([total[f"{step}_{layer}"] for layer in ids]))
    rows, layers, notes = resolve(as_layers(ids), options)
    history = sums.history()
    if rows != list(range(len(ids))):
        history = type(history)(history.tokens[:, rows], history.first_step, history.last_step)
    return LoadFile(history, layers, None, len(files), notes=notes)


def _rank_files(folder: Path) -> list[Path]:
    found = {
        int(name[1]): path for path in folder.iterdir() if (name := RANK_FILE.fullmatch(path.name))
    }
    missing = sorted(set(range(len(found))) - found.keys())
    if not found or missing:
        raise HistoryError(
            f"{len(found)} files rank*.safetensors, expected those of ranks 0, 1, 2, ..."
        )
    return [found[rank] for rank in range(len(found))]


def _counts(path: Path, num_experts: int) -> dict[str, NDArray[np.int64]]:
    check_regular(path)
    try:
        tensors = load_file(path)
    except SafetensorError as exc:
        raise HistoryError(f"{path.name} is no safetensors file: {exc}") from exc
    for key, tokens in tensors.items():
        if not KEY.fullmatch(key):
            raise HistoryError(f"{path.name}: key {key[:40]!r}, expected ITERATION_LAYER")
        check_whole(tokens, (num_experts,), f"{path.name}: {key}")
    return {key: tokens.astype(np.int64) for key, tokens in tensors.items()}


def _axes(total: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Iterations, which have no gap, and layers; each iteration has each layer."""
    pairs = {tuple(map(int, key.split("_"))) for key in total}
    steps, ids = sorted({step for step, _ in pairs}), sorted({layer for _, layer in pairs})
    if not pairs or len(pairs) != len(total) or len(pairs) != len(steps) * len(ids):
        raise HistoryError(
            f"{len(total)} counts of {len(steps)} iterations and {len(ids)} layers, "
            "expected one of each layer in each iteration"
        )
    if any(f"{step}_{layer}" not in total for step, layer in pairs):
        raise HistoryError("keys with leading zeros, expected ITERATION_LAYER")
    if steps[-1] - steps[0] + 1 != len(steps):
        raise HistoryError(f"{len(steps)} iterations in {steps[0]}..{steps[-1]}, expected no gap")
    return steps, ids


# -- configuration of the load balancer


def read_config(path: Path, options: ReadOptions) -> PlacementFile:
    """Read ``moe_load_balancer.yaml``."""
    config = _plain(read_text_bytes(path).decode())
    if not isinstance(config, dict) or config.keys() - SETTINGS:
        found = sorted(config.keys() - SETTINGS)[:1] if isinstance(config, dict) else "no mapping"
        raise HistoryError(f"found {found}, expected the keys {', '.join(sorted(SETTINGS))} alone")
    num_slots = _number(config.get("num_slots"), "num_slots")
    given = config.get("initial_global_assignments")
    if not isinstance(given, dict) or not given:
        raise HistoryError("no initial_global_assignments, expected lists of experts by layer")
    held: dict[int, list[int]] = {}
    for key, row in given.items():
        layer = _number(key, "a layer")
        if not isinstance(row, list) or len(row) != num_slots or layer in held:
            raise HistoryError(f"layer {layer}, expected one list of {num_slots} experts")
        held[layer] = [_number(expert, f"layer {layer}") for expert in row]
    ids = sorted(held)
    table = np.array([held[layer] for layer in ids])
    if table.max() >= num_slots:
        raise HistoryError(f"expert {table.max()} in {num_slots} slots, expected fewer experts")
    num_experts = options.experts_in(num_slots, int(table.max()))
    rows, layers, notes = resolve(as_layers(ids), options)
    updates = _number(config.get("layer_updates_per_iter", "0"), "layer_updates_per_iter")
    placement = Placement(table[rows].astype(np.int32), num_experts)
    return PlacementFile(
        placement, layers, notes=notes, provenance={"layer_updates_per_iter": updates}
    )


def _number(value: Any, where: str) -> int:
    if not isinstance(value, str) or not NUMBER.fullmatch(value):
        found = repr(value[:20]) if isinstance(value, str) else type(value).__name__
        raise HistoryError(f"{where} is {found}, expected a whole number")
    return int(value)


def _plain(text: str) -> Any:
    """YAML as dicts, lists and text. Nothing is constructed, and no alias is followed."""
    root: list[Any] = []
    stack: list[Any] = [root]
    keys: list[Any] = [None]  # the key that waits for its value, for each open mapping
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            if number > MAX_EVENTS or len(stack) > MAX_DEPTH + 1:
                raise HistoryError(f"more than {MAX_EVENTS} items or {MAX_DEPTH} levels of YAML")
            if isinstance(event, yaml.AliasEvent):
                raise HistoryError("an alias in YAML, expected plain values")
            if isinstance(event, yaml.CollectionEndEvent):
                stack.pop()
                keys.pop()
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
                _put(stack, keys, value)
                stack.append(value)
                keys.append(None)
            elif isinstance(event, yaml.ScalarEvent):
                _put(stack, keys, event.value)
    except yaml.YAMLError as exc:
        raise HistoryError(f"no YAML: {' '.join(str(exc).split())[:200]}") from exc
    if len(root) != 1:
        raise HistoryError(f"{len(root)} documents of YAML, expected one")
    return root[0]


def _put(stack: list[Any], keys: list[Any], value: Any) -> None:
    container = stack[-1]
    if isinstance(container, list):
        container.append(value)
    elif keys[-1] is None:
        if not isinstance(value, str) or value in container:
            raise HistoryError(f"key {value!r} of YAML twice, or no text".replace("\n", " ")[:200])
        keys[-1] = value
    else:
        container[keys[-1]] = value
        keys[-1] = None


def write_config(
    file: PlacementFile, num_ranks: int | None, layer_updates_per_iter: int = 0
) -> tuple[bytes, tuple[str, ...]]:
    """Write ``moe_load_balancer.yaml`` with the engine's three keys, lists in rows."""
    ranks_of(file, num_ranks, "TensorRT-LLM has as many slots on each rank")
    file, notes = filled(file, num_ranks)
    layers = model_layers(file.layers, "layers of TensorRT-LLM have the model's numbers")
    lines = ["initial_global_assignments:"]
    for layer, row in zip(layers.ids, file.placement.slot_to_expert.tolist(), strict=True):
        lines.append(f"  {layer}: [{', '.join(map(str, row))}]")
    lines.append(f"layer_updates_per_iter: {layer_updates_per_iter}")
    lines.append(f"num_slots: {file.placement.num_slots}")
    note = (
        "TensorRT-LLM ignores the section in silence unless it knows the architecture, expert "
        "parallelism and attention data parallelism are on (its PR 18626)"
    )
    return ("\n".join(lines) + "\n").encode(), (*notes, note)
