"""Co-locates experts that tokens choose together, so that a token is sent to fewer nodes.

Dispatch sends a token to a node once, however many of its experts are there. The objective uses
how often one token chooses both experts of a pair:

    together = sum over pairs of the frequency of the pair * probability that their replicas,
               each chosen evenly, are on one node

The number of copies of a token falls as it grows. Replicas are swapped, across nodes and within
them, while imbalance falls or ``together`` rises by enough for the imbalance that it costs.

Shapes:  T windows, L MoE layers, E experts, K experts of a token, S slots, R ranks, N nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import FloatArray, IntArray, copy_into, inner, kernel
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.shares.traffic import share_by_node

WARM, COLD = 1e-2, 1e-5  # first and last temperature, in imbalance
DEFAULT_STEPS = 200_000  # swaps that are tried in a layer: a second for ten layers


def coactivation(expert_ids: NDArray[np.integer], num_experts: int) -> FloatArray:
    """[L, E, E] part of tokens that choose both experts, from ids [L, tokens, K] padded with -1."""
    num_layers, num_tokens, _ = expert_ids.shape
    together = np.zeros((num_layers, num_experts, num_experts))
    for layer, ids in enumerate(expert_ids):
        chosen = np.zeros((num_tokens, num_experts + 1), dtype=np.float32)
        np.put_along_axis(chosen, ids.astype(np.int64), 1.0, axis=1)  # -1 is the last column
        chosen = chosen[:, :num_experts]
        together[layer] = (chosen.T @ chosen) / max(num_tokens, 1)
        np.fill_diagonal(together[layer], 0.0)
    return together


def nodes_per_token(
    expert_ids: NDArray[np.integer], placement: Placement, topology: Topology
) -> FloatArray:
    """[L] distinct nodes that a token of ids [L, tokens, K] is sent to, mean over tokens.

    The replica of each expert is chosen by its share, independently of the token's other experts.
    """
    nodes = np.zeros(len(expert_ids))
    part = share_by_node(placement.slot_share, placement, topology)  # [L, E, N]
    for layer, ids in enumerate(expert_ids):
        absent = np.where((ids >= 0)[:, :, None], 1.0 - part[layer, ids], 1.0)
        nodes[layer] = (1.0 - absent.prod(axis=1)).sum(axis=1).mean()
    return nodes


def colocate_coactivated(
    problem: Problem,
    placement: Placement,
    together: FloatArray,
    *,
    price: float,
    steps: int = DEFAULT_STEPS,
) -> Placement:
    """``placement`` with replicas swapped so that experts chosen together share nodes.

    Replica counts and slot counts do not change; constraints and expert groups are not supported.
    For a fresh plan: nearly all experts move.

    Args:
        problem: the windows, by which imbalance is computed at equal split, and the seed.
        placement: to start from; every layer full, no expert twice on a rank.
        together: [L, E, E] see ``coactivation``.
        price: imbalance that one pair of experts on one node is worth, for every token.
        steps: swaps to try in each layer.

    Raises:
        ConfigError: a price or co-activation out of range, or constraints.
    """
    expected = (placement.num_layers, placement.num_experts, placement.num_experts)
    if together.shape != expected or not (np.isfinite(together) & (together >= 0)).all():
        raise ConfigError(
            f"coactivation has shape {together.shape}, expected finite figures {expected}, "
            "0 or more"
        )
    if not 0 <= price < np.inf:
        raise ConfigError(f"price of a pair is {price}, expected 0 or more, and finite")
    if problem.groups_stay or problem.constraints.binds_experts:
        raise ConfigError("expert groups and constraints are not supported here, expected none")
    topology = problem.topology
    rank, node = topology.rank_of_slot.astype(np.int64), topology.node_of_rank.astype(np.int64)
    slowness = 1.0 / topology.rank_speed
    held = placement.slot_to_expert.astype(np.int64)
    rng = np.random.default_rng(problem.seed)
    slots = rng.integers(topology.num_slots, size=(steps, 2))
    cooling = WARM * (COLD / WARM) ** np.linspace(0.0, 1.0, steps)
    loss = cooling * rng.exponential(size=steps)  # that each swap may make
    weighed = problem.weighed
    for layer in range(len(held)):
        work = np.array(weighed[layer], order="C")
        pairs = np.ascontiguousarray(together[layer], dtype=np.float64)
        held[layer] = _annealed(work, pairs, held[layer], rank, node, slowness, price, slots, loss)
    return Placement(held.astype(np.int32), placement.num_experts, placement.generation)


@kernel
def _annealed(
    work: FloatArray,
    pairs: FloatArray,
    held: IntArray,
    rank_of_slot: IntArray,
    node_of_rank: IntArray,
    slowness: FloatArray,
    price: float,
    slots: IntArray,
    loss: FloatArray,
) -> IntArray:
    """[S] the best placement found by swaps of ``slots`` [steps, 2]: simulated annealing."""
    num_experts, num_nodes = work.shape[1], node_of_rank.max() + 1
    replicas = np.zeros(num_experts)
    for expert in held:
        if expert >= 0:
            replicas[expert] += 1.0
    part = np.zeros((num_experts, num_nodes))
    on_rank = np.zeros((len(node_of_rank), num_experts), dtype=np.bool_)
    load = np.zeros((work.shape[0], len(node_of_rank)))
    for slot, expert in enumerate(held):
        if expert >= 0:
            rank = rank_of_slot[slot]
            part[expert, node_of_rank[rank]] += 1.0 / replicas[expert]
            on_rank[rank, expert] = True
            for window in range(len(load)):
                load[window, rank] += work[window, expert] / replicas[expert] * slowness[rank]
    partners = np.zeros(part.shape)  # [E, N] weight of an expert's pairs on each node
    for one in range(num_experts):
        for other in range(num_experts):
            for node in range(num_nodes):
                partners[one, node] += pairs[one, other] * part[other, node]
    imbalance, gained, best_gain = _busiest(load), 0.0, 0.0
    now, best = held.copy(), held.copy()
    for step in range(len(loss)):
        one, two = slots[step]
        a, b, rank_a, rank_b = now[one], now[two], rank_of_slot[one], rank_of_slot[two]
        if a < 0 or b < 0 or a == b or rank_a == rank_b or on_rank[rank_a, b] or on_rank[rank_b, a]:
            continue
        node_a, node_b = node_of_rank[rank_a], node_of_rank[rank_b]
        each_a, each_b = 1.0 / replicas[a], 1.0 / replicas[b]
        nearer = 0.0
        if node_a != node_b:
            nearer = each_a * (partners[a, node_b] - partners[a, node_a])
            nearer += each_b * (partners[b, node_a] - partners[b, node_b])
            nearer -= 2.0 * each_a * each_b * pairs[a, b]
        _swap_load(load, work, slowness, (a, rank_a, each_a), (b, rank_b, each_b))
        after = _busiest(load)
        gain = imbalance - after + price * nearer
        if gain < -loss[step]:
            _swap_load(load, work, slowness, (b, rank_a, each_b), (a, rank_b, each_a))
            continue
        now[one], now[two] = b, a
        on_rank[rank_a, a] = on_rank[rank_b, b] = False
        on_rank[rank_a, b] = on_rank[rank_b, a] = True
        if node_a != node_b:
            for expert in range(num_experts):
                shift = pairs[expert, b] * each_b - pairs[expert, a] * each_a
                partners[expert, node_a] += shift
                partners[expert, node_b] -= shift
        imbalance = after
        gained += gain
        if gained > best_gain:
            best_gain = gained
            copy_into(best, now)
    return best


@inner
def _swap_load(
    load: FloatArray,
    work: FloatArray,
    slowness: FloatArray,
    one: tuple[int, int, float],
    other: tuple[int, int, float],
) -> None:
    """Swap replicas of two ranks, each as expert, rank and part of the expert's tokens."""
    (mine, here, each_mine), (theirs, there, each_theirs) = one, other
    for window in range(len(load)):
        change = work[window, theirs] * each_theirs - work[window, mine] * each_mine
        load[window, here] += change * slowness[here]
        load[window, there] -= change * slowness[there]


@inner
def _busiest(load: FloatArray) -> float:
    """Busiest rank, mean over windows."""
    total = 0.0
    for window in range(len(load)):
        most = 0.0
        for rank in range(load.shape[1]):
            most = max(most, load[window, rank])
        total += most
    return total / len(load)
