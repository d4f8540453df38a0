"""How SGLang splits the tokens of an expert over its replicas after a start with a map.

``--init-expert-location`` with an all-to-all passes the rank to ``init_by_mapping``: before it
draws, each rank replaces the list of an expert by the replica on its own GPU or node, where there
is one. So each rank draws for other experts, with the same seed, and the draws of two ranks do not
complement each other as those of a live rebalance do (``eplb/core/dispatch.py``). Computed as in
``expert_location.py`` of 0.5.23. Without an all-to-all the lists stay whole.

Shapes:  L rows of the map, E experts, S slots, R ranks.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from eplb.core.dispatch import SGLANG_SEED
from eplb.core.topology import Topology

IntArray = NDArray[np.int64]


def start_shares(held: IntArray, topology: Topology, *, is_static: bool) -> NDArray[np.float64]:
    """[L, S] part of its expert's tokens that each slot gets, if each rank has equally many.

    Args:
        held: [L, S] the map with all rows of the engine: dense rows consume draws too.
        topology: ranks and nodes.
        is_static: the engine's dispatch algorithm ``static``; else ``dynamic``.
    """
    found, num_ranks = np.zeros(held.shape), topology.num_ranks
    draws = [random.Random(SGLANG_SEED) for _ in range(num_ranks)]
    for row, experts in enumerate(held):
        order = np.argsort(experts, kind="stable")
        for slots in np.split(order, np.flatnonzero(np.diff(experts[order])) + 1):
            nearest = _nearest(slots, topology)
            own, open_ranks = nearest[nearest >= 0], np.flatnonzero(nearest < 0)
            np.add.at(found[row], own, 1 / num_ranks)
            for place, rank in enumerate(open_ranks):
                if is_static:
                    drawn = _fair(slots.tolist(), len(open_ranks), draws[rank])
                    found[row, drawn[place]] += 1 / num_ranks
                else:
                    found[row, slots] += 1 / num_ranks / len(slots)
    return found


def _nearest(slots: IntArray, topology: Topology) -> IntArray:
    """[R] the replica that each rank uses without a draw; -1 where it draws."""
    if len(slots) == 1:
        return np.repeat(slots, topology.num_ranks)
    of_slots, node = topology.rank_of_slot[slots], topology.node_of_rank
    same = of_slots == np.arange(topology.num_ranks)[:, None]  # [R, replicas]
    near = node[of_slots] == node[:, None]
    near &= ~near.all(axis=1, keepdims=True)
    closest = np.where(same.any(axis=1, keepdims=True), same, near)
    return np.where(closest.any(axis=1), slots[closest.argmax(axis=1)], -1)


def _fair(slots: list[int], count: int, draw: random.Random) -> list[int]:
    """All replicas equally often, and the remainder drawn; in random order."""
    often, rest = divmod(count, len(slots))
    found = slots * often + draw.sample(slots, k=rest)
    draw.shuffle(found)
    return found
