"""FlashLB: replicas by risk instead of mean load, and a fresh table relabelled to reduce moves.

From windows each expert has a mean, a variance, and covariances with the others; the risk of a load
is mean + z * deviation, with z the upper quartile of a normal distribution.

1. **Replica counts, in groups of heat.** Experts are sorted by risk and cut into groups. For each
   group but the last it is tried how many of the spare slots it gets: what a greedy count over all
   remaining experts gives it, or up to eight more or fewer; each try is placed and scored on the
   windows, and the best stays.
2. **Placement.** Experts by decreasing load of a replica, each to the rank whose risk with it would
   be least; covariances separate experts whose loads rise together. Never twice on a rank.
3. **Relabelling.** Ranks of the new table are matched to the serving ones so that most experts stay
   (an assignment problem), and experts that stay keep their slot.

A layer whose placement would leave a slot empty keeps its old one. Ranks are assumed to be equal.

Published as a vllm-ascend policy (vllm-project/vllm-ascend, ``policy_flashlb.py``) and in
vllm-project/vllm pull request 37656. This is written anew from that behaviour, its quirks included:
a window of all loads is counted with one token more, and so is every expert in the score.

Shapes:  T windows, L MoE layers, E experts, R ranks, C slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.policies.table import contiguous_policy
from simulations.peers.engines import Table, kept_in_place, placement_of, table_of

Z = NormalDist().inv_cdf(0.75)
DEPTH, WIDTH = 4, 8  # groups of heat, and how far from the greedy count each is tried
MOST_SAMPLES = 64  # windows; more are added up in even parts


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of one layer's experts over the windows."""

    windows: NDArray[np.float64]  # [T, E]
    mean: NDArray[np.float64]  # [E]
    deviation: NDArray[np.float64]  # [E]
    covariance: NDArray[np.float64]  # [E, E]

    @property
    def risk(self) -> NDArray[np.float64]:
        """[E] risk of each expert's load."""
        return self.mean + Z * self.deviation


def flashlb(problem: Problem) -> Placement:
    """Make a fresh plan of each layer on the windows, relabelled to the serving placement.

    Raises:
        PlacementError: ranks of different sizes, which FlashLB does not know.
    """
    current = problem.current if problem.current is not None else contiguous_policy(problem)
    return _planned(problem, current, np.ones(current.num_layers, dtype=np.bool_))


class FlashlbWhenDue:
    """FlashLB as vllm-ascend runs it: only layers whose balance fell are planned.

    It fell where its ratio of the mean to the busiest rank is below a part of what the latest plan
    promised, or below a floor; both are stricter where ranks are few. What each layer was planned
    for is kept with the placement that then serves, so that one object may plan for several
    deployments in turn.
    """

    def __init__(self) -> None:
        self._promised: dict[
            str, NDArray[np.float64]
        ] = {}  # [L] ratios, by hash of the serving placement

    def __call__(self, problem: Problem) -> Placement:
        """Plan the layers that are due.

        Raises:
            PlacementError: as ``flashlb``.
        """
        current = problem.current if problem.current is not None else contiguous_policy(problem)
        promised = self._promised.pop(current.hash, np.zeros(current.num_layers))
        ratio = _ratios(problem, current)
        part, floor = (0.95, 0.9) if problem.topology.num_ranks < 32 else (0.9, 0.85)
        due = (ratio < promised * part) | (ratio < floor) | (promised == 0)  # [L]
        found = _planned(problem, current, due)
        reached = _ratios(problem, found)
        self._promised[found.hash] = np.where(due & (reached > ratio), reached, promised)
        return found


def _planned(problem: Problem, current: Placement, due: NDArray[np.bool_]) -> Placement:
    tables = table_of(current, problem.topology)
    for layer in np.flatnonzero(due):
        tables[layer] = plan_layer(samples(problem.history.tokens[:, layer]), tables[layer])
    return placement_of(tables, current)


def _ratios(problem: Problem, placement: Placement) -> NDArray[np.float64]:
    """[L] mean over busiest rank on the windows, as FlashLB scores them."""
    tables = table_of(placement, problem.topology)
    windows = problem.history.tokens.astype(np.float64) + 1
    found = [
        1 / mean_imbalance(windows[:, layer], count, tables[layer])
        for layer, count in enumerate(placement.replica_count.astype(np.int64))
    ]
    return np.array(found)


def samples(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """[T, E] windows of one layer as it looks at them."""
    windows = tokens.astype(np.float64) + 1
    if len(windows) <= MOST_SAMPLES:
        return windows
    size = len(windows) // MOST_SAMPLES
    latest = windows[-size * MOST_SAMPLES :].reshape(MOST_SAMPLES, size, -1)
    together: NDArray[np.float64] = latest.sum(axis=1)
    return together


def plan_layer(windows: NDArray[np.float64], serving: Table) -> Table:
    """[R, C] the new table of a layer; ``serving`` where one slot would stay empty."""
    moments = moments_of(windows)
    shape = (len(serving), serving.shape[1])
    count = replica_counts(moments, shape)
    table = placed(moments.mean, moments.covariance, count, shape, Z)
    return serving if (table < 0).any() else relabelled(serving, table)


def moments_of(windows: NDArray[np.float64]) -> Moments:
    """Means, deviations and covariances; a single window has no spread."""
    mean = windows.mean(axis=0)
    off = windows - mean
    covariance = off.T @ off / max(len(windows) - 1, 1)
    return Moments(windows, mean, np.sqrt(np.diag(covariance)), covariance)


def replica_counts(moments: Moments, shape: tuple[int, int]) -> NDArray[np.int64]:
    """[E] replicas, found group by group from the hottest."""
    num_experts = len(moments.mean)
    spare = shape[0] * shape[1] - num_experts
    order = np.argsort(-moments.risk)
    size = -(-num_experts // DEPTH)
    count = np.zeros(num_experts, dtype=np.int64)
    for group in range(DEPTH - 1):
        here, after = order[group * size : (group + 1) * size], order[(group + 1) * size :]
        ladder, ladder_after = (greedy_counts(moments.risk[part], spare) for part in (here, after))
        together = greedy_counts(moments.risk[order[group * size :]], spare)[spare]
        first = int((together[: len(here)] - 1).sum())
        best, best_score = first, np.inf
        for given in _around(first, spare):
            trial = count.copy()
            trial[here], trial[after] = ladder[given], ladder_after[spare - given]
            table = placed(moments.mean, moments.covariance, trial, shape, Z)
            score = mean_imbalance(moments.windows, trial, table)
            if score < best_score:
                best, best_score = given, score
        count[here] = ladder[best]
        spare -= best
        count[after] = ladder_after[spare]
        if not spare:
            break
    return count


def _around(first: int, most: int) -> list[int]:
    """The numbers to try, nearest first, the lower before the higher."""
    tried = [first]
    for step in range(1, min(WIDTH, max(first, most - first)) + 1):
        tried += [given for given in (first - step, first + step) if 0 <= given <= most]
    return tried


@jit
def greedy_counts(risk: NDArray[np.float64], spare: int) -> NDArray[np.int64]:
    """[spare + 1, E] replicas after each spare slot, given to the heaviest replica's expert."""
    ladder = np.ones((spare + 1, len(risk)), dtype=np.int64)
    for given in range(spare):
        ladder[given + 1] = ladder[given]
        ladder[given + 1, np.argmax(risk / ladder[given])] += 1
    return ladder


@jit
def placed(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    count: NDArray[np.int64],
    shape: tuple[int, int],
    z: float,
) -> Table:
    """[R, C] experts by falling load, each to the rank that it makes least risky."""
    num_ranks, num_slots = shape
    table = np.full((num_ranks, num_slots), -1)
    used = np.zeros(num_ranks, dtype=np.int64)
    load, variance = np.zeros(num_ranks), np.zeros(num_ranks)
    for expert in np.argsort(-mean / count):
        for _ in range(count[expert]):
            best, best_risk, best_variance = -1, np.inf, 0.0
            for rank in range(num_ranks):
                held = table[rank, : used[rank]]
                if used[rank] == num_slots or (held == expert).any():
                    continue
                spread = variance[rank] + covariance[expert, expert] / count[expert] ** 2
                for other in held:
                    spread += 2 * covariance[expert, other] / count[expert] / count[other]
                risk = load[rank] + mean[expert] / count[expert] + z * np.sqrt(max(spread, 0.0))
                if risk < best_risk:
                    best, best_risk, best_variance = rank, risk, spread
            if best < 0:
                continue
            table[best, used[best]] = expert
            used[best] += 1
            load[best] += mean[expert] / count[expert]
            variance[best] = best_variance
    return table


@jit
def mean_imbalance(windows: NDArray[np.float64], count: NDArray[np.int64], table: Table) -> float:
    """Busiest over mean rank load, mean over windows; an empty slot bears the last expert's."""
    total = 0.0
    for window in windows:
        busiest = summed = 0.0
        for rank in table:
            load = 0.0
            for expert in rank:
                load += window[expert] / count[expert]
            summed += load
            busiest = max(busiest, load)
        total += (busiest * len(table) + 0.01) / (summed + 0.01)
    return total / len(windows)


def relabelled(serving: Table, table: Table) -> Table:
    """``table`` with its ranks in the order that keeps most experts where they are."""
    from scipy.optimize import linear_sum_assignment  # late: it takes a tenth of a second

    kept = np.array([[np.isin(new, old).sum() for new in table] for old in serving])
    result = np.empty_like(table)
    for old, new in zip(*linear_sum_assignment(-kept), strict=True):
        result[old] = kept_in_place(serving[old], table[new])
    return result
