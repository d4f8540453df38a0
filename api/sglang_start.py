"""How SGLang splits the tokens of an expert over its replicas after a start with a map, and maps
that are made for it.

``--init-expert-location`` with an all-to-all passes the rank to ``init_by_mapping``: before it
draws, each rank replaces the list of an expert by the replica on its own GPU or node, where there
is one. So each rank draws for other experts, with the same seed, and the draws of two ranks do not
complement each other as those of a live rebalance do (``eplb/core/dispatch.py``). Computed as in
``expert_location.py`` of 0.5.23. Without an all-to-all the lists stay whole.

A map for a start is a live one in which experts of the busiest rank are exchanged, or replicated,
as long as its load falls under this rule. Under ``static`` the draws are known: each row is tried
with its ranks turned within nodes.

Shapes:  T windows, L rows of the map, E experts, S slots, R ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from eplb.core.dispatch import SGLANG_SEED
from eplb.core.topology import Topology

IntArray = NDArray[np.int64]
LEAST = 1e-4  # part of the busiest ranks' load that an exchange has to win
MOST = 4  # ranks that are the busiest of most windows give experts, the less loaded half gets them
TURNS = 8  # draws of the ranks of a node; the best one is taken


def start_shares(held: IntArray, topology: Topology, *, is_static: bool) -> NDArray[np.float64]:
    """[L, S] part of its expert's tokens that each slot gets, if each rank has equally many.

    Args:
        held: [L, S] the map with all rows of the engine: dense rows consume draws too.
        topology: ranks and nodes.
        is_static: the engine's dispatch algorithm ``static``; else ``dynamic``.
    """
    draws = _draws(topology, is_static=is_static)
    return np.stack([_row_shares(experts, topology, draws) for experts in held])


def start_map(
    held: IntArray,
    tokens: NDArray[np.int64],
    rows: Sequence[int],
    topology: Topology,
    *,
    is_static: bool,
) -> IntArray:
    """[L, S] a map that a start balances better, or as well.

    Args:
        held: [L, S] a map with all rows of the engine.
        tokens: [T, rows, E] of the rows with routed experts.
        rows: their numbers; the others stay.
        topology: equally many ranks on each node, and slots on each rank.
        is_static: as ``start_shares``.
    """
    found, draws = held.copy(), _draws(topology, is_static=is_static)
    load_of = dict(zip(rows, tokens.swapaxes(0, 1), strict=True))
    shape = topology.num_nodes, -1, int(topology.slots_of_rank[0])
    for row, experts in enumerate(held):
        maps = [experts]
        if row in load_of:
            maps.append(_exchanged(experts, load_of[row], topology))
        turns = TURNS if is_static and row in load_of else 1
        best, begin = inf, [draw.getstate() for draw in draws]
        end = begin
        for one, turn in product(maps, range(turns)):
            turned = np.roll(one.reshape(shape), turn, axis=1).ravel()
            _set(draws, begin)
            share = _row_shares(turned, topology, draws)
            load = load_of.get(row, np.ones((1, len(experts))))[:, turned] * share
            if (score := _imbalance(load, topology)) < best:
                best, found[row], end = score, turned, [draw.getstate() for draw in draws]
        _set(draws, end)
    return found


def _exchanged(experts: IntArray, tokens: NDArray[np.int64], topology: Topology) -> IntArray:
    """[S] the row after exchanges that lower the imbalance of windows [T, E], if draws are even."""
    found, rank_of = experts.copy(), topology.rank_of_slot
    weight = tokens / max(float(tokens.sum(axis=1).mean()), 1.0)  # windows weigh by their tokens
    slots_of = [set(np.flatnonzero(found == expert).tolist()) for expert in range(weight.shape[1])]
    parts = [np.outer(weight[:, one], _load(at, topology)) for one, at in enumerate(slots_of)]
    load = np.sum(parts, axis=0)  # [T, R]
    of_rank = [set(found[rank_of == rank].tolist()) for rank in range(topology.num_ranks)]
    while True:
        idle = load.mean(axis=0).argsort(kind="stable")[: (topology.num_ranks + 1) // 2]
        order = [slot for rank in idle for slot in np.flatnonzero(rank_of == rank).tolist()]
        busiest = [rank for rank, _ in Counter(load.argmax(axis=1).tolist()).most_common(MOST)]
        for here, there, is_copy in product(
            np.flatnonzero(np.isin(rank_of, busiest)).tolist(), order, (False, True)
        ):
            one, other = int(found[here]), int(found[there])
            on_here, on_there = of_rank[rank_of[here]], of_rank[rank_of[there]]
            if one in on_there or (len(slots_of[other]) < 2 if is_copy else other in on_here):
                continue
            new = {
                one: (slots_of[one] if is_copy else slots_of[one] - {here}) | {there},
                other: (slots_of[other] - {there}) | (set() if is_copy else {here}),
            }
            changed = {at: np.outer(weight[:, at], _load(own, topology)) for at, own in new.items()}
            after = load + sum(changed[at] - parts[at] for at in new)
            if after.max(axis=1).sum() < load.max(axis=1).sum() * (1 - LEAST):
                break
        else:
            return found
        found[there] = one
        if not is_copy:
            found[here] = other
        load = after
        for slot in (here, there):
            of_rank[rank_of[slot]] = set(found[rank_of == rank_of[slot]].tolist())
        for at, own in new.items():
            slots_of[at], parts[at] = own, changed[at]


def _load(slots: set[int], topology: Topology) -> NDArray[np.float64]:
    """[R] part of the tokens of an expert that each rank gets from its slots, in the mean."""
    each, own = topology.num_ranks // topology.num_nodes, sorted(slots)
    ranks = topology.rank_of_slot[own].tolist()
    nodes = topology.node_of_rank[ranks].tolist()
    found = np.zeros(topology.num_ranks)
    open_ranks = topology.num_ranks - len(set(ranks))
    found[ranks] += 1.0
    if len(set(nodes)) > 1:
        for node in set(nodes):
            near = each - len({rank for rank, at in zip(ranks, nodes, strict=True) if at == node})
            found[ranks[nodes.index(node)]] += near  # the first replica of a node serves its ranks
            open_ranks -= near
    np.add.at(found, ranks, open_ranks / len(ranks))
    return found / topology.num_ranks


def _draws(topology: Topology, *, is_static: bool) -> list[random.Random]:
    """The generator of each rank; none where nothing is drawn."""
    return [random.Random(SGLANG_SEED) for _ in range(topology.num_ranks if is_static else 0)]


def _set(draws: list[random.Random], states: list[tuple[object, ...]]) -> None:
    for draw, state in zip(draws, states, strict=True):
        draw.setstate(state)


def _imbalance(tokens: NDArray[np.float64], topology: Topology) -> float:
    """Busiest over mean rank of tokens [T, S], in the mean over windows by their tokens."""
    load = np.add.reduceat(tokens, topology.first_slot[:-1], axis=1)
    return float(load.max(axis=1).sum() / load.mean(axis=1).sum().clip(1e-9))


def _row_shares(
    experts: IntArray, topology: Topology, draws: list[random.Random]
) -> NDArray[np.float64]:
    """[S] of a row; the generators go on."""
    found, num_ranks = np.zeros(len(experts)), topology.num_ranks
    order = np.argsort(experts, kind="stable")
    for slots in np.split(order, np.flatnonzero(np.diff(experts[order])) + 1):
        nearest = _nearest(slots, topology)
        own, open_ranks = nearest[nearest >= 0], np.flatnonzero(nearest < 0)
        np.add.at(found, own, 1 / num_ranks)
        if not draws:
            found[slots] += len(open_ranks) / num_ranks / len(slots)
            continue
        for place, rank in enumerate(open_ranks):
            found[_fair(slots.tolist(), len(open_ranks), draws[rank])[place]] += 1 / num_ranks
    return found


def _nearest(slots: IntArray, topology: Topology) -> IntArray:
    """[R] the replica that each rank uses without a draw; -1 where it draws."""
    if len(slots) == 1:
        return np.repeat(slots, topology.num_ranks)
    of_slots, node = topology.rank_of_slot[slots], topology.node_of_rank
    same = of_slots == np.arange(topology.num_ranks)[:, None]  # [R, replicas]
    near = node[of_slots] == node[:, None]
    near &= ~near.all(axis=1, keepdims=True)
    closest = np.where(same.any(axis=1, keepdims=True), same, near)
    return np.where(closest.any(axis=1), slots[closest.argmax(axis=1)], -1)


def _fair(slots: list[int], count: int, draw: random.Random) -> list[int]:
    """All replicas equally often, and the remainder drawn; in random order."""
    often, rest = divmod(count, len(slots))
    found = slots * often + draw.sample(slots, k=rest)
    draw.shuffle(found)
    return found
