"""Uneven shares without another kernel: physical ids repeated in vLLM's map of replicas.

vLLM's router chooses entry ``(row * 2654435769 mod 2**32) mod count`` of an expert's list of
physical ids. An id that stands in the list k times gets k / count of the rows. With a count that is
a power of two, consecutive rows visit every entry once before any entry again, because the
multiplier is odd. The ids are ordered so that every prefix of the rows is close to the shares too,
which matters for batches of fewer rows than entries.

Shapes:  L MoE layers, E experts, S slots (physical experts), K lists, W entries of a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.common.replica_weights import apportioned, by_expert
from rebalance.engines.common.tap import IntArray

MULTIPLIER = 2654435769  # of the router's hash; ``guards`` compares it with the engine's source
WORD = 2**32
EQUAL = 2e-3  # shares that differ by less, relative to their mean, are equal
ENTRIES = 256  # of a list: an error of 0.2 % at most over 4,096 rows
# Bits of a sorting key: the place of a turn, then the replica. Two places of lists of 256 entries
# differ by 2**-17 at least, or not at all.
PLACE_BITS, REPLICA_BITS = 20, 8

Ints = IntArray


@dataclass(frozen=True, eq=False)
class RepeatedLists:
    """Lists of the experts that need one, by layer and expert; all others keep vLLM's own."""

    layers: Ints  # [K] ascending
    experts: Ints  # [K]
    entries: NDArray[np.int32]  # [K, W] physical ids, as the router indexes them

    def of_layer(self, layer: int) -> tuple[Ints, NDArray[np.int32]]:
        """[k] experts with a list in a layer, and [k, W] their lists."""
        first, end = np.searchsorted(self.layers, [layer, layer + 1])
        return self.experts[first:end], self.entries[first:end]


def repetitions(held: Ints, share: NDArray[np.float64], num_entries: int = ENTRIES) -> Ints:
    """[L, S] how often each slot stands in the list of its expert; 0: plain lists.

    The figures of an expert sum to ``num_entries``. An expert with one replica needs no list, and
    neither has one with equal shares among a power of two of replicas: vLLM's own list is exact.

    Args:
        held: [L, S] expert of each slot, -1 for an empty one.
        share: [L, S] part of its expert's tokens; sums to 1 over the replicas of an expert.
        num_entries: a power of two, 256 at most.
    """
    repeats = np.zeros(held.shape, dtype=np.int64)
    layers, slots, groups = by_expert(held, held >= 0)
    count = np.bincount(groups)
    parts = share[layers, slots]
    is_uneven = np.bincount(groups, np.abs(parts * count[groups] - 1.0) >= EQUAL) > 0
    needs_list = (is_uneven | (count & (count - 1) > 0)) & (count > 1) & (count <= num_entries)
    chosen = needs_list[groups]
    layers, slots, parts = layers[chosen], slots[chosen], parts[chosen]
    repeats[layers, slots] = apportioned(parts, groups[chosen], num_entries)
    return repeats


def repeated_lists(held: Ints, repeats: Ints) -> RepeatedLists:
    """Lists of the experts whose slots have repetitions.

    Args:
        held: [L, S] expert of each slot.
        repeats: [L, S] as ``repetitions`` gives them; sums alike for every expert that has any.
    """
    layers, slots, groups = by_expert(held, repeats > 0)
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    if not len(firsts):
        none = np.zeros(0, dtype=np.int64)
        return RepeatedLists(none, none, np.zeros((0, 0), dtype=np.int32))
    times = repeats[layers, slots].astype(np.int32)
    sizes = np.diff(firsts, append=len(slots))
    replica = (np.arange(len(slots)) - np.repeat(firsts, sizes)).astype(np.int32)
    begins = np.cumsum(times, dtype=np.int32) - times
    turn = np.arange(int(times.sum()), dtype=np.int32) - np.repeat(begins, times)
    # The middle of each turn: sorted, the turns of an expert's slots interleave evenly.
    place = ((2 * turn + 1) << PLACE_BITS) // np.repeat(times, times)
    keys = ((place << REPLICA_BITS) | np.repeat(replica, times)).reshape(len(firsts), -1)
    keys.sort(axis=1)
    # The entry for a row is placed where the router looks for that row.
    replicas = (keys & (2**REPLICA_BITS - 1))[:, np.argsort(hashed(keys.shape[1]))]
    entries = slots.astype(np.int32)[replicas + firsts[:, None].astype(np.int32)]
    return RepeatedLists(layers[firsts], held[layers, slots][firsts], entries)


def hashed(num_entries: int) -> Ints:
    """The entry of each of the first rows, in a list of so many entries."""
    rows = np.arange(num_entries, dtype=np.uint64)
    return (rows * MULTIPLIER % WORD % num_entries).astype(np.int64)


def chosen_replicas(rows: Ints, entries: Ints) -> Ints:
    """The physical id of each row: the router's rule, in numpy."""
    found: Ints = entries[(rows.astype(np.uint64) * MULTIPLIER % WORD % len(entries)).astype(int)]
    return found
