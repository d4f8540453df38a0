"""Imbalance of a placement, and the lower bound of any placement.

imbalance is max / mean over ranks (1.0 is perfect); balancedness is its inverse.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import kernel
from eplb.core.placement import EMPTY, Placement, by_expert
from eplb.core.topology import Topology

# Tokens as counted, or multiplied by each expert's cost per token.
Load = NDArray[np.int64] | NDArray[np.float64]


def slot_load(
    tokens: Load, placement: Placement, share: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[..., L, S] tokens that each slot gets when ``tokens`` [..., L, E] are split by share."""
    experts = np.maximum(placement.slot_to_expert, 0)
    shape = (*tokens.shape[:-1], placement.num_slots)
    per_slot = np.take_along_axis(tokens, np.broadcast_to(experts, shape), axis=-1)
    load: NDArray[np.float64] = np.multiply(per_slot, share, dtype=np.float64)
    return load


def rank_load(tokens: Load, placement: Placement, topology: Topology) -> NDArray[np.float64]:
    """[..., L, R] tokens that each rank gets when ``tokens`` [..., L, E] are split by share."""
    return _load_by_share(tokens, placement, placement.slot_share, topology)


def _load_by_share(
    tokens: Load, placement: Placement, share: NDArray[np.float64], topology: Topology
) -> NDArray[np.float64]:
    layers = np.ascontiguousarray(tokens, dtype=np.float64).reshape(-1, *tokens.shape[-2:])
    layers.flags.writeable = False  # a view: the kernel is compiled once, for read-only arrays
    share.flags.writeable = False
    load = _rank_load(layers, placement.slot_to_expert, share, topology.first_slot)
    by_rank: NDArray[np.float64] = load.reshape(*tokens.shape[:-1], topology.num_ranks)
    return by_rank


@kernel
def _rank_load(
    tokens: NDArray[np.float64],
    held: NDArray[np.int32],
    share: NDArray[np.float64],
    first_slot: NDArray[np.int64],
) -> NDArray[np.float64]:
    num_windows, num_layers, _ = tokens.shape
    load = np.zeros((num_windows, num_layers, len(first_slot) - 1))
    for window in range(num_windows):
        for layer in range(num_layers):
            for rank in range(len(first_slot) - 1):
                for slot in range(first_slot[rank], first_slot[rank + 1]):
                    expert = held[layer, slot]
                    if expert >= 0:
                        part = tokens[window, layer, expert] * share[layer, slot]
                        load[window, layer, rank] += part
    return load


def rank_sum(per_slot: NDArray[np.float64], topology: Topology) -> NDArray[np.float64]:
    """[..., R] a figure of slots [..., S], summed by rank."""
    total = np.zeros((*per_slot.shape[:-1], topology.num_ranks))
    for rank in range(topology.num_ranks):
        total[..., rank] = per_slot[..., topology.slots_on(rank)].sum(axis=-1)
    return total


def live_shares(
    placement: Placement, topology: Topology
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[L, S] shares without dead ranks, and [L, E] experts without a live slot.

    Live replicas take over the shares of dead ones, in proportion to their own shares.
    """
    alive, held = topology.alive[topology.rank_of_slot], placement.slot_to_expert
    if not (held[:, ~alive] != EMPTY).any():
        return placement.slot_share, np.zeros((len(held), placement.num_experts), dtype=np.bool_)
    live = np.where(alive, held, EMPTY)
    count = by_expert(live, placement.num_experts, None)
    total = by_expert(live, placement.num_experts, placement.slot_share * alive)
    mine = np.maximum(held, 0)
    sums, counts = (np.take_along_axis(table, mine, axis=1) for table in (total, count))
    share = np.where(sums > 0, placement.slot_share / np.maximum(sums, 1e-300), 1.0)
    share = np.where(sums > 0, share, 1.0 / np.maximum(counts, 1))
    return np.where(live != EMPTY, share, 0.0), np.asarray(count == 0)


def imbalance_of(load: NDArray[np.float64], topology: Topology) -> NDArray[np.float64]:
    """Max over mean of a rank load [..., R], by the time of each rank.

    Ranks that are dead or have no slots count neither in the maximum nor in the mean. A layer
    without tokens counts as 1.0.
    """
    serving = topology.serving
    time = (load / topology.rank_speed)[..., serving]
    fair = load[..., serving].sum(axis=-1) / topology.rank_speed[serving].sum()
    ratio: NDArray[np.float64] = np.ones(load.shape[:-1])
    np.divide(time.max(axis=-1, initial=0.0), fair, out=ratio, where=fair > 0)
    return ratio


def imbalance(tokens: Load, placement: Placement, topology: Topology) -> NDArray[np.float64]:
    """Busiest over mean rank load, one value per layer.

    Args:
        tokens: [..., L, E] tokens routed to each expert.
        placement: the placement to judge; need not be the one the tokens were counted under.
        topology: says which slots share a rank, and how fast and alive each rank is.

    Returns:
        [..., L], 1.0 or more. 1.0 is perfect; 2.0 means the busiest rank takes twice as long as
        it would at perfect balance, so the layer runs at half speed. Replicas on dead ranks leave
        their tokens to the live ones; infinity where tokens are for an expert without a live slot,
        because no rank ever serves them.
    """
    share, lost = live_shares(placement, topology)
    ratio = imbalance_of(_load_by_share(tokens, placement, share, topology), topology)
    if lost.any():
        ratio[(tokens * lost).any(axis=-1)] = np.inf
    return ratio


def balancedness(tokens: Load, placement: Placement, topology: Topology) -> NDArray[np.float64]:
    """Mean over busiest rank load: the inverse of ``imbalance``, in (0, 1].

    Source: the ratio that vLLM logs (vllm/distributed/eplb/eplb_state.py), but per layer, and 1.0
    for an idle layer.
    """
    inverse: NDArray[np.float64] = 1.0 / imbalance(tokens, placement, topology)
    return inverse
