"""Whether a plan fits the engine's map: each rank checks the same bytes in the same way."""

from __future__ import annotations

import numpy as np

from eplb.core.placement import Placement
from eplb.errors import PlacementError
from rebalance.engines.common.tap import IntArray
from rebalance.engines.sglang.planner.planning import Planned
from rebalance.engines.sglang.tap import Shape


def check_target(planned: Planned, held: IntArray, shape: Shape) -> None:
    """Refuse a plan that the engine's map cannot take.

    Raises:
        PlacementError: another shape, an expert that is not there or has no slot, or a row without
            routed experts that changes.
    """
    found = planned.slot_to_expert
    if found.shape != held.shape or planned.weights.shape != held.shape:
        raise PlacementError(f"the plan has shape {found.shape}, expected {held.shape}")
    if planned.weights.min() < 1:
        raise PlacementError(f"a slot has weight {planned.weights.min()}, expected 1 or more")
    sources, num_ranks = planned.sources, shape.num_ranks if shape.algorithm == "static" else 0
    if sources.shape != (len(held), shape.num_experts, num_ranks):
        raise PlacementError(
            f"the plan has choices of source ranks of shape {sources.shape}, "
            f"expected {(len(held), shape.num_experts, num_ranks)}"
        )
    is_slot = (sources >= 0) & (sources < held.shape[1])
    rows, experts = np.arange(len(held))[:, None, None], np.arange(shape.num_experts)[:, None]
    wrong = ~is_slot | (found[rows, np.where(is_slot, sources, 0)] != experts)
    for row, expert, rank in np.argwhere(wrong)[:1]:
        raise PlacementError(
            f"row {row}: rank {rank} would use slot {sources[row, expert, rank]} for expert "
            f"{expert}, expected a slot that holds it"
        )
    Placement(found.astype(np.int32), shape.num_experts)
    if found.min() < 0:
        raise PlacementError("the plan has an empty slot, expected an expert in each")
    strays = np.flatnonzero((found != held).any(axis=1) & ~shape.movable)
    if strays.size:
        raise PlacementError(f"row {strays[0]} has no routed experts, expected it unchanged")
