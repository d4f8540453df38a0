"""How much of a proposed placement the budget allows: whole layers, best gain per move first.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.placement import EMPTY, Placement, duplicate_replicas
from eplb.problem import Problem
from eplb.topology import Topology


def moves_per_layer(base: Placement, target: Placement) -> NDArray[np.int64]:
    """[L] weights that must move from ``base`` to ``target``."""
    new = (base.slot_to_expert != target.slot_to_expert) & (target.slot_to_expert != EMPTY)
    per_layer: NDArray[np.int64] = new.sum(axis=1)
    return per_layer


def within_budget(
    problem: Problem,
    base: Placement,
    proposed: Placement,
    before: NDArray[np.float64],
    after: NDArray[np.float64],
) -> tuple[Placement, NDArray[np.float64], tuple[tuple[int, float], ...]]:
    """Take layers by gain per move until the budget is spent; each layer taken is a curve point."""
    moves = moves_per_layer(base, proposed)
    gain = (before - after) / np.maximum(moves, 1)
    forced = _layers_that_cannot_serve(base, problem.topology)
    order = sorted(range(len(moves)), key=lambda layer: (layer not in forced, -gain[layer], layer))
    chosen: list[int] = []
    spent, balance = 0, before.copy()
    curve = [(0, float(balance.mean()))]
    for layer in order:
        fits = problem.max_moves is None or spent + moves[layer] <= problem.max_moves
        if not fits and layer not in forced:
            continue
        chosen.append(layer)
        spent += int(moves[layer])
        balance[layer] = after[layer]
        if moves[layer]:
            curve.append((spent, float(balance.mean())))
    return base.with_layers(proposed, chosen), balance, tuple(curve)


def _layers_that_cannot_serve(base: Placement, topology: Topology) -> frozenset[int]:
    """Layers with doubles on one rank or experts on dead ranks."""
    lost = (base.slot_to_expert[:, ~topology.alive[topology.rank_of_slot]] != EMPTY).any(axis=1)
    doubled = duplicate_replicas(base, topology)[:, 0]
    return frozenset(np.flatnonzero(lost).tolist()) | frozenset(doubled.tolist())
