"""Max/mean over ranks with planned shares, with the split, and the optimum on the same replicas.

Plans are made on earlier windows and judged on later ones. Windows hold the given tokens of each
rank, in recorded order (one request after another) or with blocks of 32 tokens mixed, as a batch of
many requests. The optimum is that of the batch's linear program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.ranks.batch_split.recorded import (
    CASES,
    NUM_HISTORY,
    Case,
    Ints,
    expert_ids,
    windows,
)
from eplb import plan
from eplb.shares.batch import MOST_WAYS, SplitRule, split_batch, split_layout

MOST_WINDOWS = 8  # that are judged


def optimum(counts: Ints, ranks: list[Ints], num_ranks: int) -> float:
    """Least tokens of the busiest rank: the linear program on given replicas."""
    return optimal_parts(counts, ranks, num_ranks)[0]


def optimal_parts(
    counts: Ints, ranks: list[Ints], num_ranks: int
) -> tuple[float, list[tuple[int, int]], NDArray[np.float64]]:
    """The optimum, the pairs of expert and rank, and the tokens of each pair."""
    from scipy.optimize import linprog

    pairs = [(expert, rank) for expert, held in enumerate(ranks) for rank in held.tolist()]
    columns = np.arange(len(pairs))
    expert, rank = np.array(pairs).T
    on_rank = np.zeros((num_ranks, len(pairs) + 1))
    on_rank[rank, columns], on_rank[:, -1] = 1.0, -1.0
    of_expert = np.zeros((len(counts), len(pairs) + 1))
    of_expert[expert, columns] = 1.0
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    found = linprog(cost, on_rank, np.zeros(num_ranks), of_expert, counts, method="highs")
    return float(found.fun), pairs, found.x[:-1]


@dataclass(frozen=True)
class Judged:
    """Max/mean over ranks of one layer and window."""

    planned: float
    split: float
    best: float


def judge(case: Case, tokens: int, rounds: int, order: str) -> Iterator[Judged]:
    """Layers of the windows that follow the plan's."""
    loads = windows(expert_ids(case), tokens * case.num_ranks, order)
    half = min(NUM_HISTORY, len(loads) // 2)
    topology = case.topology
    placement = plan(loads[:half].sum(axis=0), topology).target
    rank_of = topology.rank_of_slot
    for layer in range(placement.num_layers):
        held = placement.expert_to_slots[layer]
        layout = split_layout(
            held,
            placement.slot_share[layer],
            rank_of,
            num_split=case.num_slots - placement.num_experts,
            ways=MOST_WAYS,
        )
        ranks = [np.unique(rank_of[slots[slots >= 0]]) for slots in held]
        share = placement.slot_share[layer]
        for counts in loads[half : half + MOST_WINDOWS, layer]:
            mean = counts.sum() / case.num_ranks
            per_slot = counts[placement.slot_to_expert[layer]] * share
            planned = np.bincount(rank_of, per_slot).max()
            split = split_batch(counts, layout, SplitRule(rounds=rounds)).rank_load.max()
            yield Judged(
                planned / mean, split / mean, optimum(counts, ranks, case.num_ranks) / mean
            )


def show_balance(tokens: list[int], rounds: int, order: str) -> None:
    """Print one line for each case and size."""
    print(f"{'case':28}{'tokens':>7}{'layers':>7}{'planned':>9}{'split':>9}{'LP':>9}", end="")
    print(f"{'split/LP':>10}{'p99':>9}{'max':>9}{'excess kept':>12}")
    for case in CASES:
        for size in tokens:
            found = list(judge(case, size, rounds, order))
            planned, split, best = np.array([(j.planned, j.split, j.best) for j in found]).T
            gap = split / best
            kept = (split - 1).mean() / (planned - 1).mean()
            print(
                f"{case.name:28}{size:7}{len(found):7}{planned.mean():9.4f}{split.mean():9.4f}"
                f"{best.mean():9.4f}{gap.mean():10.4f}{np.quantile(gap, 0.99):9.4f}"
                f"{gap.max():9.4f}{kept:12.2f}",
                flush=True,
            )
