"""Imbalance of a placement, and the lower bound of any placement.

imbalance is max / mean over ranks (1.0 is perfect); balancedness is its inverse.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import of_type, on_host
from eplb.core.demand import Demand, time_of
from eplb.core.jit import FloatArray, kernel
from eplb.core.placement import EMPTY, Placement, whole_shares
from eplb.core.problem import Problem, scale
from eplb.core.topology import Topology
from eplb.core.zones import is_exact, replicate, zone_bound, zones_for
from eplb.errors import ConfigError, HistoryError

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
    tokens = _as_load(tokens)
    _check_slots(placement, topology)
    expected = (placement.num_layers, placement.num_experts)
    if tokens.shape[-2:] != expected:
        raise ConfigError(
            f"load has shape {tokens.shape}, expected [..., {expected[0]} layers, {expected[1]} "
            "experts] as the placement"
        )
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < np.inf):
        wrong = ~((tokens >= 0) & (tokens < np.inf))
        raise HistoryError(
            f"load has {tokens.flat[wrong.argmax()]} tokens of an expert, expected finite numbers, "
            "0 or more"
        )
    layers = np.ascontiguousarray(tokens, dtype=np.float64).reshape(-1, *tokens.shape[-2:])
    layers.flags.writeable = False  # a view: the kernel is compiled once, for read-only arrays
    share.flags.writeable = False
    load = _rank_load(layers, placement.slot_to_expert, share, topology.first_slot)
    by_rank: NDArray[np.float64] = load.reshape(*tokens.shape[:-1], topology.num_ranks)
    return by_rank


def _as_load(tokens: object) -> Load:
    """Tokens as an array of numbers, which they are nearly always."""
    try:
        load: Load = np.asarray(on_host(tokens))
    except ValueError as exc:
        raise HistoryError(f"load is no array: {exc}, expected [..., layers, experts]") from exc
    if load.dtype.kind not in "iufb":
        raise HistoryError(f"load has dtype {load.dtype}, expected numbers")
    return load


def _check_slots(placement: Placement, topology: Topology) -> None:
    """Refuse a placement of other slots: a kernel would read behind its arrays."""
    of_type("placement", placement, Placement)
    of_type("topology", topology, Topology)
    if placement.num_slots != topology.num_slots:
        raise ConfigError(
            f"the placement has {placement.num_slots} slots a layer, the topology has "
            f"{topology.num_slots}"
        )


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
    _check_slots(placement, topology)
    alive, held = topology.alive[topology.rank_of_slot], placement.slot_to_expert
    if not (held[:, ~alive] != EMPTY).any():
        return placement.slot_share, np.zeros((len(held), placement.num_experts), dtype=np.bool_)
    return whole_shares(np.where(alive, held, EMPTY), placement.slot_share, placement.num_experts)


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


BISECTIONS = 40
SOME_TOKENS = 40.0  # above it a replica has tokens in every step: exp(-40) is negligible
FEWEST_TOKENS = 1e-4  # a replica's in a step: below, a token costs the curve's first time
FINE = 1e-3  # relative step between the token counts below SOME_TOKENS that are tried


def lower_bound(tokens: Load, topology: Topology) -> NDArray[np.float64]:
    """[L] lower bound of the imbalance of any placement with equal split on ``tokens`` [L, E].

    Giving the next replica to the expert with the largest load per replica minimises the largest
    replica; some rank must hold that one, so largest / mean is a bound, and so is 1. An expert
    gets at most as many replicas as there are live ranks: two on one rank do not improve balance.
    """
    of_type("topology", topology, Topology)
    tokens = _as_load(tokens)
    if tokens.ndim != 2:
        raise HistoryError(f"load has shape {tokens.shape}, expected [layers, experts]")
    if topology.usable_slots.sum() < tokens.shape[1]:
        return np.ones(len(tokens))
    load = np.ascontiguousarray(tokens, np.float64)
    return zone_bound(scale(load, topology), zones_for(load, topology, 1))


def bound_of(problem: Problem) -> FloatArray:
    """[L] lower bound of the mean over windows, for any placement in these slots and any shares.

    In units of the score. The mean over windows of a maximum is at least the maximum of the mean
    window, and one of an expert's replicas gets at least their mean; idle windows count as 1. Where
    expert groups stay on nodes and all packings can be tried, it is the bound of the best packing.
    """
    topology = problem.topology
    if problem.objective == "time":
        return _time_bound(problem)
    is_busy = (problem.routed > 0).astype(np.float64)  # [T, L]
    busy = problem.mean_over_windows(is_busy)
    stay = problem.groups_stay and is_exact(problem.num_groups, topology.num_nodes)
    mean = problem.mean_scaled
    zones = zones_for(mean, topology, problem.num_groups if stay else 1, problem.room)
    # In units of the mean rank load over busy windows.
    while_busy = mean / np.maximum(busy, 1e-300)[:, None]
    bound = np.maximum(zone_bound(while_busy, zones), _least_beside_hottest(problem, while_busy))
    if problem.dispatch.by_rank and len(set(problem.tokens_of_node.tolist())) == 1:
        np.maximum(bound, _by_rank(problem, while_busy), out=bound)
    bounded: FloatArray = 1.0 + busy * (bound - 1.0)
    return bounded


def _least_beside_hottest(problem: Problem, mean: FloatArray) -> FloatArray:
    """[L] least load of the hottest expert's rank where there is no redundant slot; else 0.

    Then every slot is in use, and the other slots of that rank hold at best the coldest experts.
    """
    room, speed = problem.room, problem.topology.rank_speed
    sorted_mean = np.sort(mean, axis=1)
    coldest = np.concatenate([np.zeros((len(mean), 1)), np.cumsum(sorted_mean, axis=1)], axis=1)
    beside = np.clip(room - 1, 0, problem.num_experts)  # a rank may have more slots than experts
    others = np.take_along_axis(coldest, beside, axis=1)  # [L, R]
    time = np.where(room > 0, (sorted_mean[:, -1:] + others) / speed, np.inf)
    full = room.sum(axis=1) == problem.num_experts
    least: FloatArray = np.where(full, time.min(axis=1), 0.0)
    return least


def _by_rank(problem: Problem, mean: FloatArray) -> FloatArray:
    """[L] lower bound of the largest replica when each source rank uses one replica of an expert.

    With m replicas one of them serves at least ceil(R / m) of R equal sources. Found by bisection:
    a limit is too low if it needs more replicas than there are slots.
    """
    topology, num_ranks = problem.topology, problem.topology.num_ranks
    most = problem.room.sum(axis=1)
    work = mean / topology.rank_speed.max()
    low, high = work.max(axis=1) / num_ranks, work.max(axis=1)
    for _ in range(BISECTIONS):
        limit = (low + high) / 2
        sources = np.floor(limit[:, None] * num_ranks / np.maximum(work, 1e-300) + 1e-9)
        needed = np.ceil(num_ranks / np.clip(sources, 1, num_ranks)).sum(axis=1)
        fits = (needed <= most) & (sources >= 1).all(axis=1)
        low, high = np.where(fits, low, limit), np.where(fits, limit, high)
    limits: FloatArray = low
    return limits


def _time_bound(problem: Problem) -> FloatArray:
    """[L] lower bound of the slowest rank's time, mean over windows, in units of the score.

    Some rank holds the largest replica, and some rank takes at least the mean time. Splitting an
    expert's tokens may save time where the curve is convex, so the mean counts each token at its
    least cost in any replica with at most the expert's tokens.
    """
    topology, demand = problem.topology, problem.timed_demand
    num_layers, num_experts, num_windows = demand.tokens.shape
    usable = (problem.room > 0) & topology.serving
    num_slots, num_ranks = problem.room.sum(axis=1), usable.sum(axis=1)
    fastest = np.where(usable, topology.rank_speed, 0.0).max(axis=1)
    together = np.where(usable, topology.rank_speed, 0.0).sum(axis=1)
    one = np.ones((num_layers, num_experts), dtype=np.int64)
    cheapest = _cheapest_token(demand)
    bound = np.zeros(num_layers)
    for window in range(num_windows):
        tokens = np.ascontiguousarray(demand.tokens[:, :, window])
        count = replicate(tokens, one - 1, num_slots[:, None], num_ranks[:, None], one)
        largest = time_of((tokens / count).max(axis=1), demand)
        rate, extra = demand.rate[:, window], demand.extra[:, window]
        everything = (tokens * cheapest[:, :, window]).sum(axis=1) * rate + extra * num_ranks
        time = np.maximum((largest * rate + extra) / fastest, everything / together)
        bound += np.where(rate > 0, time, 1.0) * demand.weight[window]
    return bound


def _cheapest_token(demand: Demand) -> FloatArray:
    """[L, E, T] the least time per token of any replica with at most an expert's tokens."""
    tokens = demand.tokens
    # Time never falls with tokens, so between two of these counts a token costs at least the lower
    # time divided by the higher count. Above SOME_TOKENS the curve is linear between its points.
    few = np.exp(np.arange(np.log(FEWEST_TOKENS), np.log(SOME_TOKENS), FINE))
    least = np.minimum.accumulate(time_of(few[:-1], demand) / few[1:])
    least = np.minimum(least, time_of(few[:1], demand) / few[0])
    points = np.append(demand.curve_tokens, few[-1])
    points = np.sort(points[points >= few[-1]])
    so_far = np.minimum.accumulate(np.append(least[-1], time_of(points, demand) / points))
    own = time_of(tokens, demand) / np.maximum(tokens, FEWEST_TOKENS)
    many = np.minimum(own, so_far[np.searchsorted(points, tokens, side="right")])
    cell = np.clip(np.searchsorted(few, tokens) - 1, 0, len(least) - 1)
    cheapest: FloatArray = np.where(tokens > few[-1], many, least[cell])
    return cheapest
