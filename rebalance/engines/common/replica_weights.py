"""Uneven shares as whole weights of slots, which engines serve as lists or tables of replicas.

A slot with weight w stands w times in the list of its expert, or is the choice of w source ranks.

Shapes:  L layers, E experts, S slots, K lists of one length, W entries of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.common.tap import IntArray

# Bits of a sorting key of 32: the place of a turn, then one of up to 1,024 replicas. Two places of
# lists of 256 entries differ by 2**-17 at least, or not at all.
PLACE_BITS, REPLICA_BITS = 20, 10

# From the number of replicas of some experts, their largest and their smallest share: which need a
# list of weights.
NeedsList = Callable[
    [IntArray, NDArray[np.float64], NDArray[np.float64]],
    NDArray[np.bool_],
]


def shares_of(held: IntArray, weights: NDArray[Any]) -> NDArray[np.float64]:
    """[L, S] share of its expert's tokens that each slot gets in proportion to these weights."""
    total = np.zeros((len(held), int(held.max()) + 1))
    rows = np.arange(len(held))[:, None]
    np.add.at(total, (rows, held), weights)
    share: NDArray[np.float64] = weights / total[rows, held]
    return share


def list_weights(
    held: IntArray, share: NDArray[np.float64], length: int, needs_list: NeedsList, *, plain: int
) -> IntArray:
    """[L, S] whole numbers in proportion to the shares, by largest remainder.

    Args:
        held: [L, S] expert of each slot, -1 for an empty one.
        share: [L, S] in proportion to these, over the replicas of an expert.
        length: sum of the weights of an expert that needs a list. Each replica has at least 1.
        needs_list: says which do; none with more replicas than ``length`` gets one.
        plain: the weight of all other slots.
    """
    weights = np.full(held.shape, plain, dtype=np.int64)
    layers, slots, groups = _by_expert(held, held >= 0)
    count, parts = np.bincount(groups), share[layers, slots]
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    most, least = np.maximum.reduceat(parts, firsts), np.minimum.reduceat(parts, firsts)
    chosen = ((count <= length) & needs_list(count, most, least))[groups]
    weights[layers[chosen], slots[chosen]] = _apportioned(parts[chosen], groups[chosen], length)
    return weights


def spread_lists(
    held: IntArray, weights: IntArray
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Yield for each length layers [K], experts [K] and lists [K, W] of the slots with a weight.

    The entries of a slot are spread over the list, so that the first rows of a small batch are
    split as nearly by the weights as whole rows can be.

    Args:
        held: [L, S] expert of each slot.
        weights: [L, S] how often each slot stands in the list of its expert; 0: it has none.
    """
    layers, slots, groups = _by_expert(held, weights > 0)
    times = weights[layers, slots].astype(np.int32)
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    replica = (np.arange(len(slots)) - firsts[groups]).astype(np.int32)
    length = np.bincount(groups, times).astype(np.int64)
    for entries in np.unique(length).tolist():
        chosen = np.flatnonzero(length == entries)
        own = np.flatnonzero((length == entries)[groups])
        of_turn = np.repeat(own, times[own])
        begins = np.cumsum(times[own], dtype=np.int32) - times[own]
        turn = np.arange(len(of_turn), dtype=np.int32) - np.repeat(begins, times[own])
        # The middle of each turn: sorted, the turns of an expert's slots interleave evenly.
        place = ((2 * turn + 1) << PLACE_BITS) // times[of_turn]
        keys = ((place << REPLICA_BITS) | replica[of_turn]).reshape(len(chosen), -1)
        keys.sort(axis=1)
        replicas = keys & (2**REPLICA_BITS - 1)
        first = firsts[chosen]
        yield layers[first], held[layers, slots][first], slots[replicas + first[:, None]]


def _by_expert(held: IntArray, chosen: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
    """Layers and slots of the chosen ones, and a number 0, 1, ... for each expert of each layer.

    Sorted by layer, expert and slot.
    """
    layers, slots = np.nonzero(chosen)
    experts = layers * (int(held.max(initial=0)) + 1) + held[layers, slots]
    order = np.argsort(experts, kind="stable")
    groups = (np.diff(experts[order], prepend=-1) > 0).cumsum() - 1
    return layers[order], slots[order], groups


def _apportioned(parts: NDArray[np.float64], groups: IntArray, total: int) -> IntArray:
    """Integers that sum to ``total`` in each group, by largest remainder, and 1 at least.

    Every part gets at least 1: a replica that no row chooses would hold memory for nothing.

    Args:
        parts: [n] in proportion to these.
        groups: [n] ascending, ``total`` of one at most.
        total: of each group.
    """
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
