"""Which rows the slots of a measured rank had, rebuilt from what a table says of a measurement.

The tables name a distribution and not its rows. Their collector draws experts' tokens from a power
law between 1 and 0.8 of the tokens, limits an expert to one row of each token, and measures the
rank with the most rows. Draws have no seed, so a row is predicted as the mean over draws, or over
those nearest to the tokens of the rank where the table has them.

Shapes:  E experts, S slots of the measured rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Spread:
    """How tokens spread over experts.

    Args:
        slots: of all ranks, filled by the collector's own balancer; None: experts in their order.
        is_by_expert: what rounding leaves goes to the smallest experts, as the collector had it
            at first, and not to all ranks alike.
    """

    tokens: int  # tokens of all ranks of the group
    experts: int
    top_k: int
    ranks: int
    alpha: float = 0.0  # exponent of the power law
    slots: int | None = None
    is_by_expert: bool = False


def even(spread: Spread) -> tuple[Counts, int]:
    """Rows [S] of the first rank, and its tokens, where experts are chosen in turn."""
    stride = -(-spread.experts // spread.top_k)
    token, choice = np.arange(spread.tokens)[:, None], np.arange(spread.top_k)[None]
    start = token if spread.tokens >= stride else token * stride / spread.tokens
    chosen = ((start + choice * stride) % spread.experts).astype(np.int64)
    here = spread.experts // spread.ranks
    counts: Counts = np.bincount(chosen.ravel(), minlength=spread.experts)[:here]
    return counts, int((chosen < here).any(axis=1).sum())


@cache
def drawn(spread: Spread, number: int) -> tuple[tuple[Counts, int], ...]:
    """Rows [S] of the busiest rank, and its tokens, in each of some draws."""
    return tuple(_draws(spread, number))


def _draws(spread: Spread, number: int) -> Iterator[tuple[Counts, int]]:
    seed = [spread.tokens, spread.experts, spread.top_k, spread.ranks, int(1000 * spread.alpha)]
    for draw in range(number):
        rng = np.random.default_rng([*seed, spread.slots or 0, draw])
        of_experts = _tokens_of_experts(spread, rng)
        if spread.slots is None:
            groups = of_experts.reshape(spread.ranks, -1)
            first = int(groups.sum(axis=1).argmax())
            order = [first, *(rank for rank in range(spread.ranks) if rank != first)]
            rows = groups[order].ravel()
        else:
            rows = _balanced(of_experts, spread.slots, spread.ranks)
        here = len(rows) // spread.ranks
        yield rows[:here], _tokens_of_rank(rows, spread.tokens, here)


def _tokens_of_experts(spread: Spread, rng: np.random.Generator) -> Counts:
    copies = spread.tokens * spread.top_k
    low, high = (1, 0.8 * spread.tokens) if copies > spread.experts else (0.01, 2)
    power = 1 - spread.alpha
    part = rng.random(spread.experts)
    weight = ((high**power - low**power) * part + low**power) ** (1 / power)
    counts: Counts = np.rint(weight / weight.sum() * copies).astype(np.int64)
    beyond = int(np.maximum(counts - spread.tokens, 0).sum())
    counts = np.minimum(counts, spread.tokens)
    if spread.is_by_expert:
        for expert in np.argsort(-counts, kind="stable")[::-1]:
            added = min(beyond, spread.tokens - int(counts[expert]))
            counts[expert] += added
            beyond -= added
        missing = copies - int(counts.sum())
        if missing > 0:
            ranked = np.argsort(-counts, kind="stable")[::-1]
            counts[np.resize(ranked, missing)] += 1
    else:
        missing = max(copies - int(counts.sum()), 0)
        for rank, group in enumerate(counts.reshape(spread.ranks, -1)):
            _level_up(group, missing // spread.ranks + (rank < missing % spread.ranks))
    for _ in range(int(counts.sum()) - copies):
        counts[counts.argmax()] -= 1
    return counts


def _level_up(group: Counts, added: int) -> None:
    """Give rows to whichever expert of a rank has the fewest, in place."""
    group.sort()
    sums = np.cumsum(group)
    for filled in range(1, len(group) + 1):
        if filled == len(group) or group[filled] * filled - sums[filled - 1] >= added:
            level, rest = divmod(int(sums[filled - 1]) + added, filled)
            group[:filled] = level
            group[:rest] += 1
            return


def _balanced(of_experts: Counts, num_slots: int, ranks: int) -> Counts:
    """Rows of all slots, those of the busiest rank first, as the collector's balancer places."""
    replicas = np.ones(len(of_experts), dtype=np.int64)
    expert_of_slot = list(range(len(of_experts)))
    heap = [(-float(tokens), expert) for expert, tokens in enumerate(of_experts)]
    heapq.heapify(heap)
    while len(expert_of_slot) < num_slots:
        expert = heap[0][1]
        replicas[expert] += 1
        expert_of_slot.append(expert)
        heapq.heapreplace(heap, (-of_experts[expert] / replicas[expert], expert))
    load = (of_experts / replicas)[expert_of_slot]
    ranked = [(0.0, rank) for rank in range(ranks)]
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for slot in np.argsort(-load, kind="stable"):
        total, rank = heapq.heappop(ranked)
        of_rank[rank].append(int(slot))
        if len(of_rank[rank]) < num_slots // ranks:
            heapq.heappush(ranked, (total + load[slot], rank))
    first = max(range(ranks), key=lambda rank: float(load[of_rank[rank]].sum()))
    order = [*of_rank[first], *(s for r in range(ranks) if r != first for s in of_rank[r])]
    exact = load[order]
    rows = np.floor(exact).astype(np.int64)
    left = int(of_experts.sum() - rows.sum())
    rows[np.argsort(rows - exact, kind="stable")[:left]] += 1
    return rows


def _tokens_of_rank(rows: Counts, tokens: int, here: int) -> int:
    """Tokens that have a row in the first ``here`` slots: the largest slots take tokens in turn."""
    order = np.argsort(-rows, kind="stable")
    ends = np.cumsum(rows[order])
    edges = np.zeros(2 * tokens + 1, dtype=np.int64)
    ours = order < here
    starts = (ends - rows[order])[ours] % tokens
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + rows[order][ours], -1)
    has = np.cumsum(edges)[:-1].reshape(2, tokens).sum(axis=0)
    return int((has > 0).sum())
