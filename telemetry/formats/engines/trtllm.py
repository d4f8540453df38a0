"""TensorRT-LLM: the folder of expert statistics, and ``moe_load_balancer.yaml``.

Layers have the model's numbers. Statistics are a file for each rank with the tokens that it routed,
by ``ITERATION_LAYER``; the sum of all ranks is the load.

Source: ``tensorrt_llm/_torch/expert_statistic.py`` and ``MoeLoadBalancerConfig``.

Shapes:  L MoE layers, E experts, P slots.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from eplb.errors import HistoryError
from telemetry.formats.bounded import (
    check_regular,
    member,
    read_json,
    read_text_bytes,
    whole_array,
    whole_number,
)
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    WriteOptions,
    Written,
    as_layers,
    assignments,
    check_cells,
    history_of,
    placement_of,
    ranks_summed,
    whole_steps,
)

RANK_FILE = re.compile(r"rank(\d{1,5})\.safetensors")  # not rank0_raw.safetensors
KEY = re.compile(r"(0|[1-9]\d{0,11})_(0|[1-9]\d{0,4})")
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
    sums: dict[tuple[int, int], NDArray[np.int64]] = {}  # by iteration and layer
    seen, stages = Counter[int](), Counter[tuple[int, ...]]()  # ranks that have each, whole
    paths = _rank_files(folder)
    for path in paths:
        counts = _counts(path, num_experts)
        ids = tuple(sorted({layer for _, layer in counts}))
        layers_of = Counter(step for step, _ in counts)
        stages[ids] += 1
        seen.update({step: int(num == len(ids)) for step, num in layers_of.items()})
        for key, tokens in counts.items():
            sums[key] = sums.get(key, 0) + tokens
    layers = sorted(layer for ids in stages for layer in ids)
    if len(set(layers)) != len(layers):
        raise HistoryError(f"ranks have layers {list(stages)[:2]}, expected the same or no common")
    what = "iterations are not in all files"
    whole, notes = whole_steps(seen, len(paths), what, options)
    if whole[-1] - whole[0] + 1 != len(whole):
        raise HistoryError(
            f"{len(whole)} iterations in {whole[0]}..{whole[-1]} have each layer of every rank, "
            "expected no gap"
        )
    shape = (len(whole), len(layers), num_experts)
    check_cells("the folder", shape, sum(one.nbytes for one in sums.values()))
    tokens = np.array([[sums[step, layer] for layer in layers] for step in whole])
    num_ranks = max(stages.values()) if len(set(stages.values())) == 1 else None
    notes = (*notes, ranks_summed(len(paths)))
    return LoadFile(
        history_of(tokens, whole, whole), as_layers(layers), None, num_ranks, notes=notes
    )


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


def _counts(path: Path, num_experts: int) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Tokens [E] of a rank by iteration and layer."""
    check_regular(path)
    try:
        tensors = load_file(path)
    except SafetensorError as exc:
        raise HistoryError(f"{path.name} is no safetensors file: {exc}") from exc
    found = {}
    for key, tokens in tensors.items():
        if not (name := KEY.fullmatch(key)):
            raise HistoryError(f"{path.name}: key {key[:40]!r}, expected ITERATION_LAYER")
        tokens = whole_array(tokens, (num_experts,), f"{path.name}: {key}")
        found[int(name[1]), int(name[2])] = tokens.astype(np.int64)
    if not found:
        raise HistoryError(f"{path.name} has no counts, expected some")
    return found


def read_config(path: Path, options: ReadOptions) -> PlacementFile:
    """Read ``moe_load_balancer.yaml``."""
    config = _plain(read_text_bytes(path).decode())
    if not isinstance(config, dict) or config.keys() - SETTINGS:
        found = list(config.keys() - SETTINGS)[:1] if isinstance(config, dict) else "no mapping"
        raise HistoryError(f"found {found}, expected the keys {', '.join(sorted(SETTINGS))} alone")
    num_slots = whole_number(config.get("num_slots"), "num_slots", 1)
    given = config.get("initial_global_assignments")
    ids = sorted(whole_number(layer, "a layer") for layer in given or ())
    table = assignments(given, ids, num_slots)
    updates = whole_number(config.get("layer_updates_per_iter", 0), "layer_updates_per_iter")
    provenance = {"layer_updates_per_iter": updates}
    return placement_of(table, as_layers(ids), options, provenance=provenance)


def _plain(text: str) -> Any:
    """YAML as dicts, lists, text and whole numbers. Nothing else is constructed; no alias."""
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
                is_number = NUMBER.fullmatch(event.value) and event.implicit[0]
                _put(stack, keys, int(event.value) if is_number else event.value)
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
        if not isinstance(value, str | int) or value in container:
            raise HistoryError(f"key {value!r} of YAML twice, or no text".replace("\n", " ")[:200])
        keys[-1] = value
    else:
        container[keys[-1]] = value
        keys[-1] = None


IGNORED = (
    "TensorRT-LLM ignores the section in silence unless it knows the architecture, expert "
    "parallelism and attention data parallelism are on (its PR 18626)"
)


def write_config(file: PlacementFile, options: WriteOptions) -> Written:
    """Write ``moe_load_balancer.yaml`` with the engine's three keys, lists in rows."""
    lines = ["initial_global_assignments:"]
    for layer, row in zip(file.layers.ids, file.placement.slot_to_expert.tolist(), strict=True):
        lines.append(f"  {layer}: [{', '.join(map(str, row))}]")
    lines += ["layer_updates_per_iter: 0", f"num_slots: {file.placement.num_slots}", ""]
    return "\n".join(lines).encode(), (IGNORED,)
