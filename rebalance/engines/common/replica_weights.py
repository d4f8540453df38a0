"""Uneven shares as whole weights of slots, which engines serve as lists or tables of replicas.

Shapes:  L layers, S slots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.common.tap import IntArray


def shares_of(held: IntArray, weights: IntArray) -> NDArray[np.float64]:
    """[L, S] share of its expert's tokens that each slot gets from a list of these weights."""
    total = np.zeros((len(held), int(held.max()) + 1))
    rows = np.arange(len(held))[:, None]
    np.add.at(total, (rows, held), weights)
    share: NDArray[np.float64] = weights / total[rows, held]
    return share


def by_expert(held: IntArray, chosen: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
    """Layers and slots of the chosen ones, and one number for each expert of each layer.

    Sorted by layer, expert and slot.
    """
    layers, slots = np.nonzero(chosen)
    groups = layers * (int(held.max(initial=0)) + 1) + held[layers, slots]
    order = np.argsort(groups, kind="stable")
    return layers[order], slots[order], groups[order]


def apportioned(parts: NDArray[np.float64], groups: IntArray, total: int) -> IntArray:
    """Integers that sum to ``total`` in each group, by largest remainder, and 1 at least.

    Every part gets at least 1: a replica that no row chooses would hold memory for nothing.

    Args:
        parts: [n] in proportion to these.
        groups: [n] ascending, ``total`` of one at most.
        total: of each group.
    """
    if not len(groups):
        return np.zeros(0, dtype=np.int64)
    _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    exact = parts / np.bincount(groups, parts)[groups] * total
    whole = np.maximum(np.floor(exact), 1).astype(np.int64)
    left = total - np.bincount(groups, whole).astype(np.int64)
    firsts = np.cumsum(sizes) - sizes
    by_remainder = np.lexsort((whole - exact, groups))
    place = np.empty_like(groups)
    place[by_remainder] = np.arange(len(groups)) - firsts[groups]
    whole += place < left[groups]
    for group in np.flatnonzero(left < 0):  # tiny parts were raised to 1: the largest gives
        own = slice(firsts[group], firsts[group] + sizes[group])
        for _ in range(-left[group]):
            over = np.where(whole[own] > 1, whole[own] - exact[own], -np.inf)
            whole[own.start + int(np.argmax(over))] -= 1
    return whole
