"""Uneven shares without another kernel: physical ids repeated in vLLM's map of replicas.

vLLM's router chooses entry ``(row * 2654435769 mod 2**32) mod count`` of an expert's list of
physical ids. An id that stands in the list k times gets k / count of the rows. With a count that is
a power of two, consecutive rows visit every entry once before any entry again, because the
multiplier is odd. The ids are ordered so that every prefix of the rows is close to the shares too,
which matters for batches of fewer rows than entries.

Shapes:  L MoE layers, E experts, S slots (physical experts), W entries of a list.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MULTIPLIER = 2654435769  # of the router's hash; ``guards`` compares it with the engine's source
WORD = 2**32
EQUAL = 2e-3  # shares that differ by less, relative to their mean, are equal
ENTRIES = 256  # of a list: an error of 0.2 % at most over 4,096 rows

Ints = NDArray[np.int64]


def repetitions(held: Ints, share: NDArray[np.float64], num_entries: int = ENTRIES) -> Ints:
    """[S] how often each slot of a layer stands in the list of its expert; 0: plain lists.

    The figures of an expert sum to ``num_entries``. An expert with one replica needs no list, and
    neither has one with equal shares among a power of two of replicas: vLLM's own list is exact.

    Args:
        held: [S] expert of each slot, -1 for an empty one.
        share: [S] part of its expert's tokens; sums to 1 over the replicas of an expert.
        num_entries: a power of two.
    """
    count = np.bincount(held[held >= 0], minlength=int(held.max()) + 1)
    repeats = np.zeros(len(held), dtype=np.int64)
    for expert in np.flatnonzero(count > 1):
        slots = np.flatnonzero(held == expert)
        parts = share[slots]
        is_power = len(slots) & (len(slots) - 1) == 0
        is_equal = float(np.abs(parts * len(slots) - 1.0).max()) < EQUAL
        if len(slots) > num_entries or (is_power and is_equal):
            continue
        repeats[slots] = apportioned(parts, num_entries)
    return repeats


def apportioned(parts: NDArray[np.float64], total: int) -> Ints:
    """Integers that sum to ``total``, in proportion to ``parts`` by largest remainder.

    Every part gets at least 1: a replica that no row chooses would hold memory for nothing.
    """
    assert len(parts) <= total, "every part gets at least one"
    exact = parts / parts.sum() * total
    whole: Ints = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (left := total - int(whole.sum())) != 0:
        if left > 0:
            whole[int(np.argmax(exact - whole))] += 1
        else:
            whole[int(np.argmax(np.where(whole > 1, whole - exact, -np.inf)))] -= 1
    return whole


def layer_lists(held: Ints, repeats: Ints, num_experts: int, width: int) -> tuple[Ints, Ints]:
    """[E, W] lists of one layer padded with -1, and [E] their lengths, as vLLM's tensors have them.

    Args:
        held: [S] expert of each slot, -1 for an empty one.
        repeats: [S] as ``repetitions`` gives them.
        width: W at most, of the engine's tensor.
    """
    valid = np.flatnonzero(held >= 0)
    times = np.maximum(repeats, 1)
    lengths: Ints = np.bincount(held[valid], times[valid], num_experts).astype(np.int64)
    if lengths.max() > width:
        raise ValueError(f"a list of {lengths.max()} entries, expected {width} at most")
    slots = np.repeat(valid, times[valid])
    turn = np.arange(len(slots)) - np.repeat(np.cumsum(times[valid]) - times[valid], times[valid])
    # The middle of each turn: sorted, the turns of an expert's slots interleave evenly.
    middle = (turn + 0.5) / times[slots]
    order = np.argsort(held[slots] + middle, kind="stable")
    slots = slots[order]
    experts = held[slots]
    row = np.arange(len(slots)) - (np.cumsum(lengths) - lengths)[experts]
    # Where a list repeats ids, entry ``row`` is placed where the router looks for that row.
    has_repeats = np.zeros(num_experts, dtype=np.bool_)
    has_repeats[held[valid]] = repeats[valid] > 0
    hashed = (row.astype(np.uint64) * MULTIPLIER % WORD).astype(np.int64) % lengths[experts]
    lists = np.full((num_experts, int(lengths.max())), -1, dtype=np.int64)
    lists[experts, np.where(has_repeats[experts], hashed, row)] = slots
    return lists, lengths


def chosen_replicas(rows: Ints, entries: Ints) -> Ints:
    """The physical id of each row: the router's rule, in numpy."""
    hashed = rows.astype(np.uint64) * MULTIPLIER % WORD
    found: Ints = entries[(hashed % len(entries)).astype(np.int64)]
    return found
