"""Plans for an engine's dispatch rule: effective shares of a placement, and better placements.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.kernels import FloatArray, IntArray
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.dispatch_rules.changes import Terms
from eplb.dispatch_rules.rules import DispatchRule, effective_shares, sources_of, words_for
from eplb.dispatch_rules.search import improve_layers
from eplb.measure.balance import imbalance
from eplb.policies.greedy import FINEST_GAIN, WINDOWS_GAIN, history_noise, in_place
from eplb.search.demand import demand_of
from eplb.shares.traffic import slot_map_of, tokens_of_node

NOTED_DIFFERENCE = 0.03  # between booked and effective imbalance, from which the reason names both
LARGEST_PRICE = 1e9  # of a move, in imbalance of a layer: no move pays
EVEN_ENOUGH = 1.005  # target of fresh plans: windows differ by more than could still be gained


def as_dispatched(problem: Problem, placement: Placement) -> Placement:
    """The same experts, with the effective shares of their slots under the engine's rule.

    Raises:
        ConfigError: the engine cannot serve such a placement.
    """
    if problem.dispatch is DispatchRule.WEIGHTED:
        return placement
    share = effective_shares(
        placement, problem.topology, problem.dispatch, _tokens_of_rank(problem)
    )
    # A sum of parts may exceed 1 by a rounding error.
    share = np.clip(share, 0.0, 1.0)
    return Placement(placement.slot_to_expert, placement.num_experts, placement.generation, share)


def booked_and_effective(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Mean imbalance by the placement's shares (booked), and by the engine's rule (effective)."""
    pair = (placement, as_dispatched(problem, placement))
    booked, effective = (float(imbalance(problem.work, it, problem.topology).mean()) for it in pair)
    return booked, effective


def rule_note(problem: Problem, placement: Placement) -> str:
    """The note in a plan's reason where booked and effective imbalance differ."""
    if problem.dispatch is DispatchRule.WEIGHTED:
        return ""
    booked, effective = booked_and_effective(problem, placement)
    if not abs(effective - booked) > NOTED_DIFFERENCE:
        return ""
    return (
        f"; booked imbalance {booked:.3f} is {effective:.3f} "
        f"under dispatch rule {problem.dispatch.value}"
    )


def balanced_for_rule(problem: Problem, placement: Placement) -> Placement:
    """``placement`` improved for the engine's rule, within the budget of moves.

    Unchanged where shares do not depend on a token's source rank.
    """
    if not problem.dispatch.by_rank:
        return placement
    demand = demand_of(problem)
    work = np.ascontiguousarray(demand.tokens * demand.rate[:, None, :])
    held = placement.slot_to_expert.astype(np.int64)
    base = np.zeros((0, held.shape[1]), dtype=np.int64)
    if problem.current is not None:
        base = problem.current.slot_to_expert.astype(np.int64)
    topology = problem.topology
    sources = sources_of(topology, problem.dispatch, _tokens_of_rank(problem))
    zone_of_expert, zone = _zones(problem, held)
    improve_layers(
        work,
        demand.weight,
        held,
        base,
        1.0 / topology.rank_speed,
        zone_of_expert,
        zone,
        sources,
        words_for(held, placement, problem.dispatch),
        _terms(problem, len(demand.weight)),
    )
    if problem.current is not None:
        held = in_place(held, problem.current.slot_to_expert, topology, problem.room)
    return Placement(held.astype(np.int32), placement.num_experts, placement.generation)


def _terms(problem: Problem, num_windows: int) -> Terms:
    most = problem.max_moves if problem.current is not None else None
    target, min_gain = EVEN_ENOUGH, WINDOWS_GAIN if num_windows > 1 else FINEST_GAIN
    if problem.current is not None:
        # Finite: with a pay-back of 0 the price is infinite, and inf * 0 moves is not a number.
        price = min(float(problem.price.min()), LARGEST_PRICE)
        target, min_gain = problem.budget.target_imbalance, price
    noise = history_noise(problem) if num_windows > 1 else np.zeros(problem.history.num_layers)
    return Terms(np.maximum(target, 1.0 + noise), min_gain, -1 if most is None else most)


def _zones(problem: Problem, held: IntArray) -> tuple[IntArray, IntArray]:
    """[L, E] and [R] zones within which experts may move; -1 for experts and ranks that stay."""
    topology, slot_map = problem.topology, slot_map_of(problem)
    node = topology.node_of_rank.astype(np.int64)
    zone = np.where(slot_map.ready, node if problem.groups_stay else 0, -1)
    of_expert = np.zeros((len(held), problem.num_experts), dtype=np.int64)
    if problem.groups_stay:
        layer, slot = np.nonzero(held >= 0)
        of_expert[layer, held[layer, slot]] = node[topology.rank_of_slot[slot]]
    of_expert[slot_map.stays] = -1
    return of_expert, zone


def _tokens_of_rank(problem: Problem) -> FloatArray:
    """[R] part of the tokens that starts on each rank: that of its node, divided equally."""
    topology = problem.topology
    live = np.bincount(topology.node_of_rank, topology.alive, topology.num_nodes)
    each = tokens_of_node(problem) / np.maximum(live, 1)
    part: FloatArray = np.where(topology.alive, each[topology.node_of_rank], 0.0)
    return part
