"""Pairs of departures and arrivals of experts, grouped into turns that all ranks make together.

Every arrival is paired with a departure, so that no rank ever holds more experts than slots. Each
rank takes part in a turn at most once; a graph whose nodes have at most d edges in and d edges out
can always be divided into d such turns (König's edge colouring of bipartite graphs).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Held = tuple[int, int]  # (rank, expert)


@dataclass(frozen=True)
class Exchange:
    """An expert leaves one rank and one arrives at another, or the same, in one turn."""

    from_rank: int
    leaver: int | None  # None: the rank has a free slot
    to_rank: int
    newcomer: int | None  # None: no expert arrives


def exchanges(
    leaving: Sequence[Held], arriving: Sequence[Held], staying: Iterable[Held]
) -> list[Exchange]:
    """Pair departures with arrivals.

    Where no replica of an expert stays, its departure is paired with its first arrival: that turn
    moves the expert, and it is always served. All other pairs are arbitrary; pairs within one rank
    come first, since they involve no other rank.
    """
    stays = {expert for _, expert in staying}
    departures: dict[int, list[int]] = defaultdict(list)
    arrivals: dict[int, list[int]] = defaultdict(list)
    for rank, expert in leaving:
        departures[rank].append(expert)
    for rank, expert in arriving:
        arrivals[rank].append(expert)
    first_arrival = {expert: rank for rank, expert in reversed(arriving)}
    paired = []
    for rank, expert in leaving:
        if expert not in stays:
            stays.add(expert)
            to_rank = first_arrival[expert]
            departures[rank].remove(expert)
            arrivals[to_rank].remove(expert)
            paired.append(Exchange(rank, expert, to_rank, expert))
    return paired + _free_pairs(departures, arrivals, paired)


def _free_pairs(
    departures: dict[int, list[int]], arrivals: dict[int, list[int]], paired: Sequence[Exchange]
) -> list[Exchange]:
    gone = Counter(each.from_rank for each in paired)
    come = Counter(each.to_rank for each in paired)
    pairs = []
    going: list[tuple[int, int | None]] = []
    coming: list[tuple[int, int | None]] = []
    for rank in sorted(departures.keys() | arrivals.keys() | gone.keys() | come.keys()):
        leavers: list[int | None] = list(departures.get(rank, ()))
        newcomers: list[int | None] = list(arrivals.get(rank, ()))
        # As many arrivals as departures on every rank; None fills the difference.
        surplus = gone[rank] + len(leavers) - come[rank] - len(newcomers)
        newcomers += [None] * surplus
        leavers += [None] * -surplus
        both = min(len(leavers), len(newcomers))
        pairs += [
            Exchange(rank, leaver, rank, newcomer)
            for leaver, newcomer in zip(leavers[:both], newcomers[:both], strict=True)
        ]
        going += [(rank, leaver) for leaver in leavers[both:]]
        coming += [(rank, newcomer) for newcomer in newcomers[both:]]
    pairs += [Exchange(*out, *into) for out, into in zip(going, coming, strict=True)]
    return pairs


def in_turns(pairs: Sequence[Exchange]) -> list[list[Exchange]]:
    """Divide exchanges into the fewest turns; in a turn a rank sends and receives at most once.

    Empty exchanges of ranks with themselves make the graph regular; a regular bipartite graph has a
    perfect matching, and the rest without it is regular again.
    """
    # Imported here: it takes a tenth of a second, and commands that plan nothing need it not.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    ranks = sorted({rank for each in pairs for rank in (each.from_rank, each.to_rank)})
    index = {rank: number for number, rank in enumerate(ranks)}
    waiting: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    count = np.zeros((len(ranks), len(ranks)), dtype=np.int32)
    for each in pairs:
        ends = index[each.from_rank], index[each.to_rank]
        waiting[ends].append(each)
        count[ends] += 1
    degree = count.sum(axis=1)
    num_turns = int(degree.max())
    count[np.diag_indices(len(ranks))] += num_turns - degree
    turns = []
    for _ in range(num_turns):
        matched = maximum_bipartite_matching(csr_array(count > 0), perm_type="column")
        assert (matched >= 0).all(), "a regular bipartite graph has a perfect matching"
        count[np.arange(len(ranks)), matched] -= 1
        ends_of_turn = enumerate(matched.tolist())
        turn = [waiting[ends].pop() for ends in ends_of_turn if waiting[ends]]
        turns.append([e for e in turn if e.leaver is not None or e.newcomer is not None])
    return [turn for turn in turns if turn]
