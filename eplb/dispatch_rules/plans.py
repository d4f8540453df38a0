"""Plans for an engine's dispatch rule: what a placement makes of the ranks, and a better one.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.kernels import FloatArray, IntArray
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.dispatch_rules.changes import Terms
from eplb.dispatch_rules.rules import DispatchRule, effective_shares, sources_of, words_for
from eplb.dispatch_rules.search import settle
from eplb.measure.balance import imbalance
from eplb.policies.greedy import FINEST_GAIN, WINDOWS_GAIN, history_noise, in_place
from eplb.search.demand import demand_of
from eplb.shares.traffic import ground_of, tokens_of_node

WORTH_SAYING = 0.03  # between booked and effective imbalance
LARGEST_PRICE = 1e9  # of a move, in imbalance of a layer: none pays
EVEN_ENOUGH = 1.005  # a fresh plan's layer at it is left: the next window differs by more


def as_dispatched(problem: Problem, placement: Placement) -> Placement:
    """The same experts, with the shares that the engine's rule really gives their slots.

    Raises:
        ConfigError: the engine cannot serve such a placement.
    """
    if problem.dispatch is DispatchRule.WEIGHTED:
        return placement
    share = effective_shares(
        placement, problem.topology, problem.dispatch, _tokens_of_rank(problem)
    )
    # A sum of parts may end a rounding error above 1.
    share = np.clip(share, 0.0, 1.0)
    return Placement(placement.slot_to_expert, placement.num_experts, placement.generation, share)


def booked_and_effective(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Mean imbalance as the shares book it, and as the engine's rule makes it."""
    pair = (placement, as_dispatched(problem, placement))
    booked, effective = (float(imbalance(problem.work, it, problem.topology).mean()) for it in pair)
    return booked, effective


def rule_in_words(problem: Problem, placement: Placement) -> str:
    """What to add to a plan's reason where the rule makes other loads than shares book."""
    if problem.dispatch is DispatchRule.WEIGHTED:
        return ""
    booked, effective = booked_and_effective(problem, placement)
    if not abs(effective - booked) > WORTH_SAYING:
        return ""
    return (
        f"; booked imbalance {booked:.3f} is {effective:.3f} "
        f"under dispatch rule {problem.dispatch.value}"
    )


def settled(problem: Problem, placement: Placement) -> Placement:
    """``placement`` evened out under the rule, within the budget of moves.

    Nothing to do where shares do not depend on which rank a token starts on.
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
    settle(
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
        # Finite: no move pays at a pay-back of 0, and an infinite price of no move is not a number.
        price = min(float(problem.price.min()), LARGEST_PRICE)
        target, min_gain = problem.budget.target_imbalance, price
    noise = history_noise(problem) if num_windows > 1 else np.zeros(problem.history.num_layers)
    return Terms(np.maximum(target, 1.0 + noise), min_gain, -1 if most is None else most)


def _zones(problem: Problem, held: IntArray) -> tuple[IntArray, IntArray]:
    """[L, E] and [R]: experts go where their zone is; those that constraints bind stay."""
    topology, ground = problem.topology, ground_of(problem)
    node = topology.node_of_rank.astype(np.int64)
    zone = np.where(ground.ready, node if problem.groups_stay else 0, -1)
    of_expert = np.zeros((len(held), problem.num_experts), dtype=np.int64)
    if problem.groups_stay:
        layer, slot = np.nonzero(held >= 0)
        of_expert[layer, held[layer, slot]] = node[topology.rank_of_slot[slot]]
    of_expert[ground.stays] = -1
    return of_expert, zone


def _tokens_of_rank(problem: Problem) -> FloatArray:
    """[R] part of the tokens that starts on each rank: its node's, dealt out evenly."""
    topology = problem.topology
    live = np.bincount(topology.node_of_rank, topology.alive, topology.num_nodes)
    each = tokens_of_node(problem) / np.maximum(live, 1)
    part: FloatArray = np.where(topology.alive, each[topology.node_of_rank], 0.0)
    return part
