"""SwiftBalancer: change few experts, and let each pair of ranks exchange one at most.

The first copy of every expert stays where it is; all other slots are chosen anew.

1. **Replicas.** One spare slot after another goes to the expert with the heaviest replica.
2. **Where.** Heaviest first, to the least loaded rank with a free slot that the expert's first copy
   has sent nothing to yet. What finds no rank so goes wherever a slot is free, hottest first.
3. **Swaps.** Up to a hundred times the busiest rank swaps an expert with the idlest that it has
   not exchanged with yet, where that takes off at least 1 % of a fair rank's load.

A layer takes its new table if its busiest rank is then less busy, and experts that stay keep their
slots. A layer within 1 % of perfect balance is not changed.

Published as a vllm-ascend policy (vllm-project/vllm-ascend, ``policy_swift_balancer.py``, its
redundancy over all ranks). Written anew from that behaviour, with two quirks that decide plans: a
replica more is taken to leave an expert's replicas 2/3, 3/4, ... of what they bore, not 1/2, 2/3,
..., and what a fair rank's load is, layer 0 says for all layers.

Shapes:  L MoE layers, E experts, R ranks, C slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.errors import PlacementError
from eplb.policies.table import contiguous_policy
from simulations.peers.engines import Table, kept_in_place, placement_of, table_of

MOST_SWAPS = 100
GOOD_ENOUGH = 1.01  # imbalance of a layer that is not changed
LEAST_GAIN = 0.01  # least gain of a swap, as a part of a fair rank's load


@dataclass(eq=False)
class SwiftLayer:
    """A table in the making."""

    table: Table
    load: NDArray[np.float32]  # [R]
    weight: NDArray[np.float32]  # [E] of one replica
    sent: NDArray[np.bool_]  # [R, R] whether a rank has sent the other an expert
    received: list[set[int]]  # experts that each rank received

    def take(self, rank: int, slot: int, expert: int, sender: int) -> None:
        """Put a replica into a slot."""
        self.table[rank, slot] = expert
        self.sent[sender, rank] = True
        self.received[rank].add(expert)


def swift_balancer(problem: Problem) -> Placement:
    """Improve what serves on the tokens of all windows."""
    current = problem.current if problem.current is not None else contiguous_policy(problem)
    tables = table_of(current, problem.topology)
    tokens = problem.history.tokens.sum(axis=0).astype(np.float64)
    fair = tokens[0].sum() / len(tables[0])
    planned = [plan_layer(load, table, fair) for load, table in zip(tokens, tables, strict=True)]
    return placement_of(np.array(planned), current)


def plan_layer(tokens: NDArray[np.float64], serving: Table, fair: float) -> Table:
    """[R, C] the new table of a layer, or ``serving``."""
    before = _imbalance(tokens, serving)
    if before < GOOD_ENOUGH and (serving >= 0).all():
        return serving
    firsts, sender = first_copies(serving, len(tokens))
    free = [np.flatnonzero(~row).tolist() for row in firsts]
    extra, weight = replicas(tokens, sum(map(len, free)), len(serving))
    table = np.where(firsts, serving, -1)
    load = np.where(firsts, weight[table], 0).sum(axis=1, dtype=np.float32)
    layer = SwiftLayer(
        table, load, weight, np.zeros((len(table),) * 2, bool), [set() for _ in table]
    )
    _distribute(layer, extra, sender, free)
    if any(free):
        _fill(layer, tokens, sender, free)
    busiest = _swap(layer, fair * LEAST_GAIN)
    if (serving >= 0).all() and busiest / fair >= before:
        return serving
    return np.array([kept_in_place(*rows) for rows in zip(serving, layer.table, strict=True)])


def first_copies(serving: Table, num_experts: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """[R, C] the slots with an expert's first copy, by slot and then by rank; [E] their ranks."""
    num_ranks = len(serving)
    experts, place = np.unique(serving.T.ravel(), return_index=True)
    place = place[experts >= 0]
    firsts = np.zeros(serving.shape, dtype=np.bool_)
    firsts[place % num_ranks, place // num_ranks] = True
    sender = np.zeros(num_experts, dtype=np.int64)
    sender[experts[experts >= 0]] = place % num_ranks
    return firsts, sender


def replicas(
    tokens: NDArray[np.float64], spare: int, num_ranks: int
) -> tuple[list[int], NDArray[np.float32]]:
    """The experts of the spare slots, heaviest replica first; and [E] what a replica bears."""
    weight, count = tokens.copy(), np.ones(len(tokens), dtype=np.int64)
    for _ in range(spare):
        able = np.flatnonzero(count < num_ranks)
        if not len(able):
            break
        expert = able[len(able) - 1 - np.argmax(weight[able][::-1])]  # the last of equals
        weight[expert] *= (count[expert] + 1) / (count[expert] + 2)
        count[expert] += 1
    bears = weight.astype(np.float32)
    extra = np.repeat(np.arange(len(tokens)), count - 1)
    return extra[np.argsort(-bears[extra], kind="stable")].tolist(), bears


def _distribute(
    layer: SwiftLayer, extra: list[int], sender: NDArray[np.int64], free: list[list[int]]
) -> None:
    for expert in extra:
        able = [
            rank
            for rank, slots in enumerate(free)
            if slots and expert not in layer.table[rank] and not layer.sent[sender[expert], rank]
        ]
        if able:
            rank = min(able, key=lambda one: layer.load[one])
            layer.take(rank, free[rank].pop(), expert, sender[expert])
            layer.load[rank] += layer.weight[expert]


def _fill(
    layer: SwiftLayer, tokens: NDArray[np.float64], sender: NDArray[np.int64], free: list[list[int]]
) -> None:
    """Give free slots to the hottest that the rank lacks, by the counts that there are now."""
    count = np.bincount(layer.table[layer.table >= 0], minlength=len(tokens))
    layer.weight = (tokens / count).astype(np.float32)
    for rank, slots in enumerate(free):
        for slot in slots:
            order = np.argsort(layer.weight, kind="stable")[::-1]
            lacked = order[~np.isin(order, layer.table[rank])]
            if not lacked.size:
                raise PlacementError(
                    f"rank {rank} has {layer.table.shape[1]} slots for {len(tokens)} experts, "
                    "expected no more slots than experts: this planner never duplicates one on it"
                )
            expert = int(lacked[0])
            layer.take(rank, slot, expert, sender[expert])
            layer.weight[expert] *= count[expert] / (count[expert] + 1)
            count[expert] += 1
    layer.load = layer.weight[layer.table].sum(axis=1, dtype=np.float32)


def _swap(layer: SwiftLayer, least: float) -> float:
    """Swap until nothing gains; return the busiest rank's load."""
    busiest = 0.0
    for _ in range(MOST_SWAPS):
        order = np.argsort(layer.load, kind="stable")
        top = int(order[-1])
        busiest = float(layer.load[top])
        talked = layer.sent[top] | layer.sent[:, top]
        if not any(_swapped(layer, top, int(r), least) for r in order[:-1] if not talked[r]):
            break
    return busiest


def _swapped(layer: SwiftLayer, top: int, other: int, least: float) -> bool:
    """Swap the pair of experts that leaves the busier of both ranks the least busy, if it pays."""
    table = layer.table
    given, taken = (
        np.array([e for e in table[one] if e not in table[two] and e not in layer.received[one]])
        for one, two in ((top, other), (other, top))
    )
    if not (len(given) and len(taken)):
        return False
    shift = layer.weight[given][:, None] - layer.weight[taken]
    after = np.maximum(layer.load[top] - shift, layer.load[other] + shift)
    row, column = np.unravel_index(int(after.argmin()), after.shape)
    gain = layer.load[top] - after[row, column]
    if gain <= 0 or gain < least:
        return False
    one, two = int(given[row]), int(taken[column])
    table[top, table[top] == one] = two
    table[other, table[other] == two] = one
    layer.load[[top, other]] += np.array([-1, 1], dtype=np.float32) * shift[row, column]
    layer.received[top].add(two)
    layer.received[other].add(one)
    layer.sent[top, other] = layer.sent[other, top] = True
    return True


def _imbalance(tokens: NDArray[np.float64], table: Table) -> float:
    count = np.bincount(table[table >= 0], minlength=len(tokens))
    load = np.where(table >= 0, (tokens / np.maximum(count, 1))[table], 0).sum(axis=1)
    return float(load.max() / load.mean()) if load.any() else 1.0
