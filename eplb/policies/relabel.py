"""Exchanges experts between equal ranks with one slot to save moves, compiled.

A plan decides which experts share a rank. Where ranks hold one expert each, exchanging experts
between equal ranks changes only the number of moves.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.kernels import IntArray
from eplb.core.problem import Problem


def with_singles_kept(problem: Problem, held: IntArray, base: NDArray[np.int32]) -> IntArray:
    """[L, S] the same plan, in which ranks with one slot keep their expert where possible."""
    topology = problem.topology
    single = topology.alive & (topology.slots_of_rank == 1)
    if problem.constraints.binds_experts or single.sum() < 2:
        return held
    # Equal are ranks of one speed, and of one node where expert groups stay on theirs.
    node = topology.node_of_rank if problem.groups_stay else np.zeros(topology.num_ranks)
    keys = np.stack([node, topology.rank_speed], axis=1)
    kind = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    kinds = np.where(single & (problem.room == 1), kind, -1)
    kept = held.copy()
    _keep_singles(kept, base.astype(np.int64), topology.first_slot.astype(np.int64), kinds)
    return kept


@jit
def _keep_singles(held: IntArray, base: IntArray, first_slot: IntArray, kinds: IntArray) -> None:
    """Exchange in place; ``kinds`` [L, R] numbers sets of equal ranks, -1: not exchanged."""
    num_ranks, num_experts = kinds.shape[1], 1 + max(held.max(), base.max())
    head, following = np.empty(num_experts, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    for layer in range(len(held)):
        for kind in range(kinds[layer].max() + 1):
            head.fill(-1)  # of each expert's list of ranks to which it would move
            for rank in range(num_ranks):
                slot = first_slot[rank]
                expert = held[layer, slot] if kinds[layer, rank] == kind else -1
                if expert >= 0 and base[layer, slot] != expert:
                    following[rank] = head[expert]
                    head[expert] = rank
            for rank in range(num_ranks):
                slot = first_slot[rank]
                expert = base[layer, slot] if kinds[layer, rank] == kind else -1
                if expert < 0 or held[layer, slot] == expert:
                    continue
                other = head[expert]
                while other >= 0 and held[layer, first_slot[other]] != expert:
                    other = following[other]  # it got its own expert back meanwhile
                if other < 0:
                    continue
                head[expert] = following[other]
                there = first_slot[other]
                comes = held[layer, slot]
                held[layer, slot], held[layer, there] = expert, comes
                if comes >= 0 and base[layer, there] != comes:
                    following[other] = head[comes]
                    head[comes] = other
