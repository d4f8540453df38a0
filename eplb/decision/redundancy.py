"""Redundancy by layer: allots slots to layers by the gain of another replica in each.

Layers differ: one with a very hot expert needs many replicas, while an even one is balanced
without any. Each layer's imbalance is measured at a few slot counts; its lower convex envelope
gives the gain of the next slots, and slots are allotted by the largest gain.

    imbalance at a few slot counts -> envelope of each layer -> steepest piece first

Shapes:  T windows, L MoE layers, E experts, R ranks, K slot counts tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.arrays import whole
from eplb.core.load import LoadHistory, as_history
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError, PlacementError, TopologyError
from eplb.measure import imbalance
from eplb.policies.greedy import refined

# Slot counts at which a layer's imbalance is measured, denser where they are few. With more of them
# the gain of a slot would be overestimated, by placements that are good by chance.
NUM_TRIED = 7
LEAST_GAIN = 1e-5  # imbalance of a layer that a slot must save


def allocate_redundancy(
    history: LoadHistory | ArrayLike, topology: Topology, total_slots: int
) -> NDArray[np.int64]:
    """Allot a number of slots to the layers by marginal gain.

    Args:
        history: LoadHistory, or tokens [L, E] or [T, L, E]. Incomplete windows are not used.
        topology: its slots are the most that any one layer may use on each rank, so it must be
            wider than an equal share of ``total_slots`` for layers to differ.
        total_slots: slots of all layers together, first copies included.

    Returns:
        [L] slots of each layer, first copies included: at least E, at most the live slots, and
        together at most ``total_slots``; fewer where no layer gains by more.

    Raises:
        PlacementError: ``total_slots`` does not hold every expert once.
        HistoryError: load that cannot be planned on.
    """
    problem = Problem(as_history(history), topology)
    num_layers, num_experts = problem.history.num_layers, problem.num_experts
    spare = total_slots - num_layers * num_experts
    if spare < 0:
        raise PlacementError(
            f"{total_slots} slots in all for {num_layers} layers x {num_experts} experts, "
            "expected at least one slot for each"
        )
    tried, curve = imbalance_by_slots(problem, num_experts + spare)
    slots = np.full(num_layers, num_experts, dtype=np.int64)
    pieces = [
        (-gain, layer, int(width))
        for layer in range(num_layers)
        for gain, width in _envelope(tried, curve[layer])
    ]
    # The pieces of a layer stay in the order of its envelope, because gains fall along it.
    for _, layer, width in sorted(pieces, key=lambda piece: piece[:2]):
        taken = min(width, spare)
        slots[layer] += taken
        spare -= taken
    return slots


def slots_per_layer(slots: ArrayLike, topology: Topology) -> NDArray[np.int64]:
    """Slots of every layer on each rank, such that the totals of ranks are equal.

    Args:
        slots: [L] as ``allocate_redundancy`` returns them.
        topology: the most slots of any layer on each rank; dead and drained ranks get none.

    Returns:
        [L, R] usable slots. A layer's ranks differ by one at most where the topology has room,
        and the remainder goes to the ranks with the fewest slots so far.

    Raises:
        TopologyError: a layer has more slots than the live ranks.
    """
    wanted = np.asarray(slots, dtype=np.int64)
    room = topology.usable_slots
    usable = np.zeros((len(wanted), topology.num_ranks), dtype=np.int64)
    for layer, count in enumerate(wanted.tolist()):
        if not 0 <= count <= room.sum():
            raise TopologyError(
                f"layer {layer} is given {count} slots, expected 0..{room.sum()}, "
                "the slots on live ranks"
            )
        usable[layer] = _spread(count, room, usable.sum(axis=0))
    return usable


def imbalance_by_slots(
    problem: Problem, most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """[K] slot counts from one per expert up to ``most``, and [L, K] imbalance at each.

    Measured on fresh plans, mean over windows. A count at which a plan does worse than one
    with fewer slots counts as those: slots can be left empty.
    """
    topology = problem.topology
    room = topology.usable_slots
    extra = min(most, int(room.sum())) - problem.num_experts
    steps = np.rint(extra * np.linspace(0.0, 1.0, NUM_TRIED) ** 2)
    tried = problem.num_experts + np.unique(steps).astype(np.int64)
    curve = np.empty((problem.history.num_layers, len(tried)))
    for column, count in enumerate(tried.tolist()):
        narrow = replace(
            topology, slots_of_rank=_spread(count, room, np.zeros_like(room)).astype(np.int32)
        )
        held = refined(replace(problem, topology=narrow, current=None))
        placement = Placement(held.astype(np.int32), problem.num_experts)
        curve[:, column] = problem.mean_over_windows(imbalance(problem.work, placement, narrow))
    best_so_far: NDArray[np.float64] = np.minimum.accumulate(curve, axis=1)
    return tried, best_so_far


@dataclass(frozen=True)
class RedundancyLevel:
    """Gain and cost of a number of redundant slots on each rank."""

    slots_per_rank: int  # beyond those that hold every expert once, of each layer
    imbalance: float  # mean over layers and windows, of a fresh plan
    bytes_per_rank: int  # memory of these slots, over all layers
    kv_cache_left: float  # part of the KV cache that is left, of that without redundancy
    speed: float  # throughput by the experts' balance alone, over that without redundancy
    net: float  # throughput over that without redundancy, KV cache counted


def redundancy_price(
    history: LoadHistory | ArrayLike,
    topology: Topology,
    *,
    slot_bytes: int,
    kv_cache_bytes: int,
    levels: Sequence[int] = (0, 1, 2, 4),
    expert_part: float = 0.5,
    kv_worth: float = 1.0,
) -> tuple[RedundancyLevel, ...]:
    """Gain in balance against memory, for each number of redundant slots on a rank.

    Without redundant slots there are no replicas. A redundant slot takes memory in every layer from
    the KV cache: fewer sequences run at once, and decode throughput falls.

        net = step time without / step time with * (KV cache with / KV cache without) ** kv_worth

    Args:
        history: LoadHistory, or tokens [L, E] or [T, L, E].
        topology: ranks, their speeds and which are alive; its slots do not matter.
        slot_bytes: weights of one expert of one layer.
        kv_cache_bytes: KV cache of a rank without redundancy.
        levels: redundant slots on each rank, of each layer.
        expert_part: part of an even step that is expert time, which imbalance makes longer.
        kv_worth: exponent of throughput by the KV cache: 1.0 where the cache limits the batch size,
            0.0 where it does not.

    Returns:
        One for each level. A level whose slots leave no KV cache has a net of 0.

    Raises:
        ConfigError: figures that no deployment has.
        HistoryError: load that cannot be planned on.
    """
    _check_prices(slot_bytes, kv_cache_bytes, expert_part, kv_worth)
    windows = as_history(history)
    ranks = topology.alive.astype(np.int64)
    once = _spread(windows.num_experts, ranks * windows.num_experts, np.zeros_like(ranks))
    found: list[RedundancyLevel] = []
    without = step_without = 0.0
    for level in (0, *(whole("levels", level) for level in levels)):
        if level < 0:
            raise ConfigError(f"levels has {level} slots on a rank, expected 0 or more")
        wide = replace(topology, slots_of_rank=(once + level * ranks).astype(np.int32))
        problem = Problem(windows, wide)
        placement = Placement(refined(problem).astype(np.int32), windows.num_experts)
        even = float(problem.mean_over_windows(imbalance(problem.work, placement, wide)).mean())
        without = without or even
        even = min(even, without)  # slots may be left empty
        step = 1.0 - expert_part + expert_part * even
        step_without = step_without or step
        taken = level * windows.num_layers * slot_bytes
        left = max(0.0, 1.0 - taken / kv_cache_bytes)
        net = step_without / step * left**kv_worth if left else 0.0
        found.append(RedundancyLevel(level, even, taken, left, step_without / step, net))
    return tuple(found[1:])


def _check_prices(
    slot_bytes: int, kv_cache_bytes: int, expert_part: float, kv_worth: float
) -> None:
    if whole("slot_bytes", slot_bytes) < 1 or whole("kv_cache_bytes", kv_cache_bytes) < 1:
        raise ConfigError(
            f"slot_bytes is {slot_bytes} and kv_cache_bytes {kv_cache_bytes}, expected 1 or more"
        )
    if not 0.0 < expert_part <= 1.0 or not 0.0 <= kv_worth < inf:
        raise ConfigError(
            f"expert_part is {expert_part} and kv_worth {kv_worth}, "
            "expected above 0 and at most 1, and a finite figure of 0 or more"
        )


def _envelope(tried: NDArray[np.int64], curve: NDArray[np.float64]) -> Iterator[tuple[float, int]]:
    """(gain per slot, slots) of each piece of the lower convex envelope, while gains matter."""
    at = 0
    while at < len(tried) - 1:
        gains = (curve[at] - curve[at + 1 :]) / (tried[at + 1 :] - tried[at])
        steepest = float(gains.max())
        if steepest < LEAST_GAIN:
            return
        # The farthest of equals, so that a straight stretch is one piece.
        end = at + 1 + int(np.flatnonzero(gains == steepest)[-1])
        yield steepest, int(tried[end] - tried[at])
        at = end


def _spread(count: int, room: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.int64]:
    """[R] ``count`` slots, as equal as ``room`` allows; the remainder where ``held`` is least."""
    level = next(level for level in range(count + 1) if np.minimum(room, level + 1).sum() >= count)
    slots = np.minimum(room, level)
    rest = count - int(slots.sum())
    open_ranks = np.flatnonzero(room > level)
    chosen = open_ranks[np.argsort(held[open_ranks] + slots[open_ranks], kind="stable")[:rest]]
    slots[chosen] += 1
    return slots
