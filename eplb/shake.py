"""Out of the hollows that the local search ends in, compiled: change at random, search again.

The best state is kept. With few slots a rank, how many replicas each expert has matters as much as
where they are, and the way from one set of counts to a better one leads over worse ones. Draws
come from a seed.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.changes import Search, may_leave
from eplb.jit import jit
from eplb.kernels import Bonds, Demand, IntArray, Ranks
from eplb.layer import measure, open_layer, put, rank_of, trade
from eplb.search import Rules, best_change, make_change

CHANGES = 2  # made at random before each search
PATIENCE = 8  # steps of such a search without a better score
TRIES = 20  # draws for a change that is allowed


class Shaking(NamedTuple):
    """How long a layer is shaken, and which draws."""

    patience: int  # rounds without anything better
    seed: int


@jit
def shake(
    demand: Demand,
    held: IntArray,
    ranks: Ranks,
    bonds: Bonds,
    rules: Rules,
    shaking: Shaking,
) -> None:
    """Improve ``held`` [L, S] in place where a layer is above its target; moves are free.

    Args:
        demand: the load.
        held: experts by slot, legal.
        ranks: where slots are.
        bonds: what to keep to.
        rules: as for ``improve``; ``all_steps`` limits all layers together.
        shaking: how long, and which draws.
    """
    nothing, nobody = np.zeros((0, 0), dtype=np.float32), np.zeros(0, dtype=np.int64)
    num_layers, num_slots = held.shape
    most_replicas = num_slots - demand.tokens.shape[1] + 1
    left = rules.all_steps
    stuck = np.zeros(num_layers, dtype=np.bool_)
    for number in range(num_layers):
        if ((demand.rate[number] > 0) & (demand.weight > 0)).any():
            layer = open_layer(demand, held, bonds.zone_of_expert, ranks, number, most_replicas)
            stuck[number] = measure(layer, demand) > rules.target[number]
    for number in range(num_layers):
        if not stuck[number]:
            continue
        state = np.array([(shaking.seed + 1) * 7919 + number * 104729], dtype=np.int64)
        share = left // stuck[number:].sum()
        best_held, best = held[number].copy(), np.inf
        spent, turn, last_gain = 0, 0, 0
        while turn - last_gain <= shaking.patience:
            layer = open_layer(demand, held, bonds.zone_of_expert, ranks, number, most_replicas)
            search = Search(
                layer, demand, ranks, bonds, number, len(bonds.spread) > 0, False, nothing, nobody
            )
            score = measure(layer, demand)
            if turn > 0:
                for _ in range(CHANGES):
                    _change_at_random(search, state)
                score, steps = _settle(search, rules, best)
                spent += steps + 1  # a round counts, whatever it finds
            if score < best - 1e-12:
                best_held[:], best, last_gain = layer.held, score, turn
            layer.held[:] = best_held
            turn += 1
            if best <= rules.target[number] or spent >= share:
                break
        left -= spent


@jit
def _settle(search: Search, rules: Rules, enough: float) -> tuple[float, int]:
    """Search from here and leave the best state; its score, and how many steps it took."""
    layer = search.layer
    score = measure(layer, search.demand)
    best, best_held, best_step, step = score, layer.held.copy(), 0, 0
    while step - best_step < PATIENCE:
        change = best_change(search, rules)
        if change[0] < 0:
            break
        make_change(search, change)
        step += 1
        score = measure(layer, search.demand)
        if score < best - 1e-12:
            best, best_step = score, step
            best_held[:] = layer.held
            if best < enough and best <= rules.target[search.number]:
                break
    layer.held[:] = best_held
    return best, step


@jit
def _draw(state: IntArray, below: int) -> int:
    """A number below another: a linear congruential generator modulo 2**31."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return int((state[0] >> 8) % below)


@jit
def _change_at_random(search: Search, state: IntArray) -> None:
    """Give a redundant replica's slot to another expert, or trade two slots."""
    layer, ranks = search.layer, search.ranks
    num_slots, num_experts = len(layer.held), len(layer.replicas)
    for _ in range(TRIES):
        slot = _draw(state, num_slots)
        rank, leaves = rank_of(ranks, slot), layer.held[slot]
        if slot - ranks.first_slot[rank] >= ranks.room[search.number, rank] or leaves < 0:
            continue
        if layer.replicas[leaves] > 1 and may_go(search, leaves, rank, -1):
            expert = _draw(state, num_experts)
            fits = layer.zone_of_expert[expert] == ranks.zone[rank]
            if fits and not layer.holds[rank, expert]:
                put(layer, search.demand, ranks, slot, expert)
                return
        other = _draw(state, num_slots)
        there, theirs = rank_of(ranks, other), layer.held[other]
        if there == rank or theirs < 0 or theirs == leaves:
            continue
        if layer.holds[rank, theirs] or layer.holds[there, leaves]:
            continue
        if layer.zone_of_expert[theirs] != ranks.zone[rank]:
            continue
        if layer.zone_of_expert[leaves] != ranks.zone[there]:
            continue
        if may_go(search, leaves, rank, there) and may_go(search, theirs, there, rank):
            trade(layer, ranks, slot, other)
            return


@jit
def may_go(search: Search, expert: int, rank: int, to: int) -> bool:
    """``may_leave`` where there is anything to keep to."""
    return not search.is_bound or may_leave(search, expert, rank, to)
