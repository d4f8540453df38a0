"""Whether an engine would take a placement, and what it would do to it in silence.

Shapes:  L MoE layers, E experts, P slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, duplicate_replicas
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from telemetry.formats.engines.vllm import EXPERIMENTAL, MAX_REDUNDANT
from telemetry.formats.types import PlacementFile

Target = Literal["sglang", "vllm", "trtllm", "ascend", "eplb"]
TARGETS: tuple[Target, ...] = ("sglang", "vllm", "trtllm", "ascend", "eplb")


@dataclass(frozen=True)
class FormatFinding:
    """One thing that an engine would refuse (error), or change without reporting it (warning)."""

    code: str
    is_error: bool
    text: str


@dataclass(frozen=True)
class TargetDeployment:
    """What a user states about the deployment that shall take the placement."""

    num_ranks: int | None = None
    num_nodes: int | None = None
    num_redundant: int | None = None
    model: ModelShape | None = None
    slot_bytes: int = 0  # weights of one expert as served


def _error(code: str, text: str) -> FormatFinding:
    return FormatFinding(code, True, text)


def _warning(code: str, text: str) -> FormatFinding:
    return FormatFinding(code, False, text)


def findings(
    file: PlacementFile, target: Target, deployment: TargetDeployment
) -> list[FormatFinding]:
    """Everything that is wrong, errors first; an empty list: the engine takes it as it is.

    Raises:
        ConfigError: an unknown engine.
    """
    if target not in TARGETS:
        raise ConfigError(f"unknown engine {target!r}, expected one of: {', '.join(TARGETS)}")
    found = [
        *_shape(file, target, deployment),
        *_ranks(file, target, deployment),
        *_model(file, deployment),
        *_engine(file, target),
    ]
    return sorted(found, key=lambda one: not one.is_error)


def _shape(
    file: PlacementFile, target: Target, deployment: TargetDeployment
) -> Iterator[FormatFinding]:
    placement = file.placement
    redundant = placement.num_slots - placement.num_experts
    stated = deployment.num_redundant
    if stated is not None and stated != redundant:
        yield _error(
            "redundancy",
            f"{placement.num_slots} slots for {placement.num_experts} experts are {redundant} "
            f"redundant ones, the deployment has {stated}",
        )
    empty = int((placement.slot_to_expert == EMPTY).sum())
    if empty and target != "eplb":
        yield _error("empty-slots", f"{empty} slots hold no expert, expected one in each")
    if target == "vllm" and redundant > MAX_REDUNDANT:
        yield _error("redundancy", f"{redundant} redundant experts, vLLM has {MAX_REDUNDANT}")


def _ranks(
    file: PlacementFile, target: Target, deployment: TargetDeployment
) -> Iterator[FormatFinding]:
    placement = file.placement
    num_ranks = deployment.num_ranks or file.num_ranks
    if num_ranks is None:
        yield _warning("ranks", "checks by rank need --ranks and were not made")
        return
    if file.num_ranks not in (None, num_ranks):
        yield _error("ranks", f"the file is for {file.num_ranks} ranks, not {num_ranks}")
    if placement.num_slots % num_ranks:
        yield _error("divides", f"{placement.num_slots} slots do not divide by {num_ranks} ranks")
        return
    topology = Topology.uniform(1, num_ranks, placement.num_slots // num_ranks)
    twice = duplicate_replicas(placement, topology)
    if twice.size:
        layer, rank, expert = twice[0]
        why = (
            "the device's map has one place for it" if target == "ascend" else "it balances nothing"
        )
        yield FormatFinding(
            "duplicate",
            target == "ascend",
            f"{len(twice)} experts stand twice on one rank, first expert {expert} on rank {rank} "
            f"in layer {file.layers.ids[layer]}: {why}",
        )
    most = int(placement.replica_count.max())
    if most > num_ranks:
        yield _warning("replicas", f"an expert has {most} replicas on {num_ranks} ranks")
    each = placement.num_slots // num_ranks
    if deployment.slot_bytes:
        total = each * placement.num_layers * deployment.slot_bytes
        yield _warning("memory", f"experts take {total / 2**30:.1f} GiB on each rank")
    if deployment.num_nodes and num_ranks % deployment.num_nodes:
        yield _error("nodes", f"{num_ranks} ranks on {deployment.num_nodes} nodes")


def _model(file: PlacementFile, deployment: TargetDeployment) -> Iterator[FormatFinding]:
    model = deployment.model
    if model is None:
        return
    placement = file.placement
    if placement.num_experts != model.num_experts:
        yield _error(
            "experts", f"{placement.num_experts} experts, the model has {model.num_experts}"
        )
        return
    if file.layers.axis == "model" and set(file.layers.ids) != set(model.layer_ids):
        yield _error(
            "layers",
            f"layers {file.layers.ids[0]}..{file.layers.ids[-1]} ({len(file.layers.ids)}), "
            f"the model has {model.layer_ids[0]}..{model.layer_ids[-1]} ({model.num_layers})",
        )
    if file.layers.axis == "ordinal" and placement.num_layers != model.num_layers:
        yield _error("layers", f"{placement.num_layers} layers, the model has {model.num_layers}")
    nodes, ranks = deployment.num_nodes, deployment.num_ranks or file.num_ranks
    if not nodes or not ranks or model.num_expert_groups == 1 or placement.num_slots % nodes:
        return
    node = np.arange(placement.num_slots) * nodes // placement.num_slots
    group = placement.slot_to_expert // (model.num_experts // model.num_expert_groups)
    pairs = np.zeros((placement.num_layers, model.num_expert_groups, nodes), dtype=np.bool_)
    layer, slot = np.nonzero(placement.slot_to_expert >= 0)
    pairs[layer, group[layer, slot], node[slot]] = True
    spread = float((pairs.sum(axis=2) > 1).mean())
    if spread:
        yield _warning("groups", f"{spread:.0%} of the expert groups stand on several nodes")


def _engine(file: PlacementFile, target: Target) -> Iterator[FormatFinding]:
    axis = file.layers.axis
    if target in ("vllm", "ascend") and axis == "hidden":
        yield _error(
            "dense-rows",
            "rows may be dense layers, which the engine does not count: give "
            "--layer-ids, --first-moe-layer or --model",
        )
    if target in ("sglang", "trtllm") and axis == "ordinal":
        yield _error("layers", "layer numbers are not known, which the engine needs")
    if target == "vllm":
        yield _warning("experimental", EXPERIMENTAL)
    if target == "trtllm":
        yield _warning(
            "ignored",
            "the engine ignores the section in silence unless it knows the "
            "architecture, expert parallelism is on and attention data parallelism is on",
        )
