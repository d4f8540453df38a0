"""Whether an engine would take a placement, and what it would do to it in silence.

Shapes:  L MoE layers, E experts, P slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, duplicate_replicas
from eplb.core.topology import Topology
from telemetry.formats.engines.trtllm import IGNORED
from telemetry.formats.engines.vllm import EXPERIMENTAL, MAX_REDUNDANT
from telemetry.formats.repairs import unknown_layers
from telemetry.formats.types import PlacementFile

TARGETS = ("sglang", "vllm", "trtllm", "ascend", "eplb")
REMARKS = {"vllm": ("experimental", EXPERIMENTAL), "trtllm": ("ignored", IGNORED)}


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


def findings(file: PlacementFile, target: str, deployment: TargetDeployment) -> list[FormatFinding]:
    """Everything that is wrong, errors first; an empty list: the engine takes it as it is."""
    num_ranks, warnings = deployment.num_ranks or file.num_ranks, list[tuple[str, str]]()
    errors = [*_errors(file, target, deployment, num_ranks)]
    if num_ranks is None:
        warnings.append(("ranks", "checks by rank need --ranks and were not made"))
    else:
        if file.placement.num_slots % num_ranks == 0:
            twice = _duplicates(file, target, num_ranks)
            (errors if target == "ascend" else warnings).extend(twice)
        warnings += _warnings(file, deployment, num_ranks)
    warnings += [REMARKS[target]] if target in REMARKS else []
    return [
        *(FormatFinding(code, True, text) for code, text in errors),
        *(FormatFinding(code, False, text) for code, text in warnings),
    ]


def _errors(
    file: PlacementFile, target: str, deployment: TargetDeployment, num_ranks: int | None
) -> Iterator[tuple[str, str]]:
    placement, layers, model = file.placement, file.layers, deployment.model
    num_slots, num_experts = placement.num_slots, placement.num_experts
    redundant = num_slots - num_experts
    if deployment.num_redundant not in (None, redundant):
        yield (
            "redundancy",
            f"{num_slots} slots for {num_experts} experts are {redundant} redundant ones, the "
            f"deployment has {deployment.num_redundant}",
        )
    empty = int((placement.slot_to_expert == EMPTY).sum())
    if empty and target != "eplb":
        yield "empty-slots", f"{empty} slots hold no expert, expected one in each"
    if target == "vllm" and redundant > MAX_REDUNDANT:
        yield "redundancy", f"{redundant} redundant experts, vLLM has {MAX_REDUNDANT}"
    if file.num_ranks not in (None, num_ranks):
        yield "ranks", f"the file is for {file.num_ranks} ranks, not {num_ranks}"
    if num_ranks and num_slots % num_ranks:
        yield "divides", f"{num_slots} slots do not divide by {num_ranks} ranks"
    if num_ranks and num_ranks % (deployment.num_nodes or 1):
        yield "nodes", f"{num_ranks} ranks on {deployment.num_nodes} nodes"
    if model is not None and num_experts != model.num_experts:
        yield "experts", f"{num_experts} experts, the model has {model.num_experts}"
    elif model is not None and (
        set(layers.ids) != set(model.layer_ids)
        if layers.axis == "model"
        else layers.axis == "ordinal" and placement.num_layers != model.num_layers
    ):
        yield (
            "layers",
            f"{placement.num_layers} layers, {layers.ids[0]}..{layers.ids[-1]} ({layers.axis}), "
            f"the model has {model.num_layers}, {model.layer_ids[0]}..{model.layer_ids[-1]}",
        )
    if why := unknown_layers(layers, target):
        yield "dense-rows" if layers.axis == "hidden" else "layers", why


def _duplicates(file: PlacementFile, target: str, num_ranks: int) -> Iterator[tuple[str, str]]:
    topology = Topology.uniform(1, num_ranks, file.placement.num_slots // num_ranks)
    twice = duplicate_replicas(file.placement, topology)
    if twice.size:
        layer, rank, expert = twice[0]
        is_error = target == "ascend"
        why = "the device's map has one place for it" if is_error else "it balances nothing"
        yield (
            "duplicate",
            f"{len(twice)} experts stand twice on one rank, first expert {expert} on rank {rank} "
            f"in layer {file.layers.ids[layer]}: {why}",
        )


def _warnings(
    file: PlacementFile, deployment: TargetDeployment, num_ranks: int
) -> Iterator[tuple[str, str]]:
    placement, model = file.placement, deployment.model
    num_slots = placement.num_slots
    if (most := int(placement.replica_count.max())) > num_ranks:
        yield "replicas", f"an expert has {most} replicas on {num_ranks} ranks"
    if deployment.slot_bytes:
        total = num_slots // num_ranks * placement.num_layers * deployment.slot_bytes
        yield "memory", f"experts take {total / 2**30:.1f} GiB on each rank"
    nodes = deployment.num_nodes
    if model is None or placement.num_experts != model.num_experts or not nodes:
        return
    if model.num_expert_groups == 1 or num_slots % nodes:
        return
    node = np.arange(num_slots) * nodes // num_slots
    group = placement.slot_to_expert // (model.num_experts // model.num_expert_groups)
    pairs = np.zeros((placement.num_layers, model.num_expert_groups, nodes), dtype=np.bool_)
    layer, slot = np.nonzero(placement.slot_to_expert >= 0)
    pairs[layer, group[layer, slot], node[slot]] = True
    if spread := float((pairs.sum(axis=2) > 1).mean()):
        yield "groups", f"{spread:.0%} of the expert groups stand on several nodes"
