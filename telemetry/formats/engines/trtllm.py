"""TensorRT-LLM: the folder of expert statistics, and ``moe_load_balancer.yaml``.

Layers have the model's numbers. Statistics are a file for each rank with the tokens that it routed,
by ``ITERATION_LAYER``; the sum of all ranks is the load.

Source: ``tensorrt_llm/_torch/expert_statistic.py`` and ``MoeLoadBalancerConfig``.

Shapes:  L MoE layers, E experts, P slots.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
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
    history_of,
    placement_of,
    whole_steps,
)

RANK_FILE = re.compile(r"rank(\d{1,5})\.safetensors")  # not rank0_raw.safetensors
KEY = re.compile(r"(0|[1-9]\d{0,11})_(0|[1-9]\d{0,4})")
NUMBER = re.compile(r"\d{1,9}")
MAX_DEPTH = 4
MAX_EVENTS = 4_000_000  # 1,024 layers x 1,024 slots take 1,100,000
SETTINGS = {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}


def rank_files(folder: Path, options: ReadOptions) -> Iterator[tuple[str, LoadFile]]:
    """The files of the folder that ``EXPERT_STATISTIC_PATH`` names, one after another."""
    meta = read_json(folder / "meta_info.json")
    num_experts = whole_number(
        member(meta, "num_experts", int, "meta_info.json"), "num_experts", 1, 2**20
    )
    paths = sorted(path for path in folder.iterdir() if RANK_FILE.fullmatch(path.name))
    for path in paths:
        counts = _counts(path, num_experts)
        ids = sorted({layer for _, layer in counts})
        seen, what = Counter(step for step, _ in counts), f"iterations of {path.name} lack layers"
        whole, notes = whole_steps(seen, len(ids), what, options)
        tokens = [[counts[step, layer] for layer in ids] for step in whole]
        yield path.name, LoadFile(history_of(tokens, whole, whole), as_layers(ids), notes=notes)


def without_gap(file: LoadFile) -> LoadFile:
    """The sum of all ranks, whose iterations follow each other.

    Raises:
        HistoryError: one between them is missing.
    """
    steps = file.history.first_step
    if steps[-1] - steps[0] + 1 != len(steps):
        raise HistoryError(
            f"{len(steps)} iterations in {steps[0]}..{steps[-1]} have each layer of every rank, "
            "expected no gap"
        )
    return file


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
    kept = {"layer_updates_per_iter": updates}
    return placement_of(table, as_layers(ids), options, provenance=kept)


def _plain(text: str) -> Any:
    """YAML as dicts, lists, text and whole numbers. Nothing else is constructed; no alias."""
    stack: list[list[Any]] = [[]]  # items of each collection that is open
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            if number > MAX_EVENTS or len(stack) > MAX_DEPTH + 1:
                raise HistoryError(f"more than {MAX_EVENTS} items or {MAX_DEPTH} levels of YAML")
            if isinstance(event, yaml.AliasEvent):
                raise HistoryError("an alias in YAML, expected plain values")
            if isinstance(event, yaml.CollectionStartEvent):
                stack.append([])
            elif isinstance(event, yaml.CollectionEndEvent):
                items = stack.pop()
                is_mapping = isinstance(event, yaml.MappingEndEvent)
                stack[-1].append(_mapping(items) if is_mapping else items)
            elif isinstance(event, yaml.ScalarEvent):
                is_number = NUMBER.fullmatch(event.value) and event.implicit[0]
                stack[-1].append(int(event.value) if is_number else event.value)
    except yaml.YAMLError as exc:
        raise HistoryError(f"no YAML: {' '.join(str(exc).split())[:200]}") from exc
    if len(stack[0]) != 1:
        raise HistoryError(f"{len(stack[0])} documents of YAML, expected one")
    return stack[0][0]


def _mapping(items: list[Any]) -> dict[Any, Any]:
    made = dict[Any, Any]()
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int) or key in made:
            raise HistoryError(f"key {key!r} of YAML twice, or no text".replace("\n", " ")[:200])
        made[key] = value
    return made


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
