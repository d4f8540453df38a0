"""Spare slots: migrate a layer without overwriting slots that serve.

With spares, every rank keeps ``spare_slots`` slots of each layer EMPTY. The bytes of an arriving
expert are written into such a slot, to which no token is routed; then the routing table changes,
and the slots of the departed experts become the next spares. Policies do not see spares:

    full placement --compact--> without spares --policy--> target --expand--> full target

A layer in which more experts arrive on one rank than it has EMPTY slots takes several steps. After
each step every expert is served and every rank has its spares, so a migration may end after any.
A rank that lacks spares in ``current``, because survivors of a death refilled into them, gets them
back on the way.

Shapes:  L MoE layers, E experts, S slots with spares, R ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement, whole_shares, with_shares_of
from eplb.core.topology import Topology
from eplb.errors import PlacementError, TopologyError

Row = NDArray[np.int32]  # [S] one layer of slot_to_expert


@dataclass(frozen=True)
class LayerStep:
    """The changes to a layer by one change of the routing table."""

    fills: tuple[tuple[int, int], ...]  # (expert, slot); the slots were EMPTY before
    frees: tuple[int, ...]  # slots that are EMPTY after it


def without_spares(topology: Topology, spare_slots: int) -> Topology:
    """The same ranks with ``spare_slots`` slots fewer on each.

    Raises:
        TopologyError: a rank has fewer slots than that.
    """
    left = topology.slots_of_rank - spare_slots
    if spare_slots < 0 or (left < 0).any():
        rank = int(np.argmin(left))
        raise TopologyError(
            f"rank {rank} has {topology.slots_of_rank[rank]} slots, "
            f"expected 0 spares or more and at least as many slots, found {spare_slots} spares"
        )
    return replace(topology, slots_of_rank=left)


def compact(
    placement: Placement, topology: Topology, spare_slots: int
) -> tuple[Placement, Topology]:
    """The same experts on the same ranks in ``spare_slots`` slots fewer: the input of a policy.

    Experts keep their order on each rank; shares and generation are carried over.

    Raises:
        PlacementError: a rank has fewer EMPTY slots in some layer than spares.
        TopologyError: a rank has fewer slots than spares.
    """
    smaller = without_spares(topology, spare_slots)
    rank_of_slot = topology.rank_of_slot
    is_empty = placement.slot_to_expert == EMPTY
    order = np.argsort(2 * rank_of_slot + is_empty, axis=1, kind="stable")  # EMPTY ones last
    nth = np.arange(topology.num_slots) - topology.first_slot[rank_of_slot]
    is_spare = nth >= smaller.slots_of_rank[rank_of_slot]
    held = np.take_along_axis(placement.slot_to_expert, order, axis=1)
    overfull = np.argwhere((held != EMPTY) & is_spare)
    if overfull.size:
        layer, column = overfull[0]
        raise PlacementError(
            f"layer {layer}: rank {rank_of_slot[column]} has fewer than {spare_slots} EMPTY slots, "
            "expected every rank to have its spares"
        )
    kept = order[:, ~is_spare]
    share, source_share = np.take_along_axis(placement.slot_share, kept, 1), placement.source_share
    if source_share is not None:
        source_share = np.take_along_axis(source_share, kept[None], axis=2)
    scalars = placement.num_experts, placement.generation
    return Placement(held[:, ~is_spare], *scalars, share, source_share), smaller


def expand(
    target: Placement, current: Placement, topology: Topology, spare_slots: int
) -> Placement:
    """The placement with spares that corresponds to ``target``, a compact placement.

    Experts that stay on a rank keep their slots, arriving experts go into EMPTY ones, and the slots
    of departing experts become EMPTY. Shares and generation are those of ``target``.

    Raises:
        PlacementError: the slots of ``target`` are not those of ``topology`` without spares, or
            those of ``current`` not those of ``topology``.
    """
    steps = steps_towards(target, current, topology, spare_slots)
    held = current.slot_to_expert.copy()
    for layer, steps_of_layer in enumerate(steps):
        for step in steps_of_layer:
            take(step, held[layer])
    return with_shares_of(target, without_spares(topology, spare_slots), held, topology)


def take(step: LayerStep, row: Row) -> None:
    """Change a layer's row of ``slot_to_expert`` as a step does."""
    row[list(step.frees)] = EMPTY
    for expert, slot in step.fills:
        row[slot] = expert


def steps_towards(
    target: Placement, current: Placement, topology: Topology, spare_slots: int
) -> list[list[LayerStep]]:
    """[L] the steps of each layer from ``current`` to ``target``, a compact placement.

    The fewest possible: no rank exchanges more experts in a step than it has EMPTY slots, and an
    expert whose last replica leaves a rank arrives elsewhere in the same step.

    Raises:
        PlacementError: as ``expand``.
        TopologyError: no spares at all.
    """
    if spare_slots < 1:
        raise TopologyError(f"found {spare_slots} spares on each rank, expected 1 or more")
    smaller = without_spares(topology, spare_slots)
    for name, placement, of in (("target", target, smaller), ("current", current, topology)):
        if placement.num_slots != of.num_slots:
            raise PlacementError(
                f"the {name} placement has {placement.num_slots} slots a layer, "
                f"expected {of.num_slots}"
            )
    return [
        _layer_steps(now, _held_on(then, smaller), topology)
        for now, then in zip(current.slot_to_expert, target.slot_to_expert, strict=True)
    ]


def intermediate_placement(held: NDArray[np.int32], target: Placement) -> Placement:
    """A placement of ``held`` [L, S], an intermediate state before ``target``, with legal shares.

    Replicas that are in the target's slots already get the target's shares; an expert without such
    a replica is split equally.
    """
    is_there = held == target.slot_to_expert

    def legal(share: NDArray[np.float64]) -> NDArray[np.float64]:
        return whole_shares(held, np.where(is_there, share, 0.0), target.num_experts)[0]

    source = target.source_share
    return replace(
        target,
        slot_to_expert=held,
        slot_share=legal(target.slot_share),
        source_share=None if source is None else np.array([legal(share) for share in source]),
    )


def _held_on(row: Row, topology: Topology) -> set[tuple[int, int]]:
    """(rank, expert) of every slot in use."""
    slots = np.flatnonzero(row != EMPTY)
    return set(zip(topology.rank_of_slot[slots].tolist(), row[slots].tolist(), strict=True))


def _layer_steps(row: Row, then: set[tuple[int, int]], topology: Topology) -> list[LayerStep]:
    """Group a layer's exchanges into steps, as many in each as the EMPTY slots allow."""
    now = _held_on(row, topology)
    if now == then:
        return []
    pairs = exchanges(sorted(now - then), sorted(then - now), now & then)
    slots = _Slots(row, topology)
    steps: list[LayerStep] = []
    if any(not slots.fit([each]) for each in pairs):
        return _steps_by_room(pairs, slots)
    turns = in_turns(pairs)
    group: list[Exchange] = []
    for turn in turns:
        if group and not slots.fit([*group, *turn]):
            steps.append(slots.exchange(group))
            group = []
        group = [*group, *turn]
    return [*steps, slots.exchange(group)]


def _steps_by_room(pairs: list[Exchange], slots: _Slots) -> list[LayerStep]:
    """Make every exchange as soon as there is an EMPTY slot for it: some rank has none at first."""
    steps: list[LayerStep] = []
    while pairs:
        group: list[Exchange] = []
        for each in pairs:
            if slots.fit([*group, each]):
                group.append(each)
        # Else all arrivals left are at ranks without an EMPTY slot. Each of these ranks has one at
        # the end, so more experts leave them than arrive: one leaves in exchange for none.
        assert group, "some exchange always has room"
        steps.append(slots.exchange(group))
        pairs = [each for each in pairs if each not in group]
    return steps


class _Slots:
    """The slots of one layer while its steps are computed."""

    def __init__(self, row: Row, topology: Topology) -> None:
        self._slot_of: dict[tuple[int, int], int] = {}
        self._empty: dict[int, deque[int]] = {}  # by rank, longest EMPTY first
        for slot, (rank, expert) in enumerate(
            zip(topology.rank_of_slot.tolist(), row.tolist(), strict=True)
        ):
            if expert == EMPTY:
                self._empty.setdefault(rank, deque()).append(slot)
            else:
                self._slot_of[rank, expert] = slot

    def fit(self, group: Sequence[Exchange]) -> bool:
        """Whether there is an EMPTY slot for every arriving expert of these exchanges."""
        needed = Counter(each.to_rank for each in group if each.newcomer is not None)
        return all(count <= len(self._empty.get(rank, ())) for rank, count in needed.items())

    def exchange(self, group: Sequence[Exchange]) -> LayerStep:
        """Apply these exchanges as one step."""
        fills, frees = [], []
        for each in group:
            if each.newcomer is not None:
                # The slot that has been EMPTY longest: it becomes writable first.
                slot = self._empty[each.to_rank].popleft()
                self._slot_of[each.to_rank, each.newcomer] = slot
                fills.append((each.newcomer, slot))
        for each in group:
            if each.leaver is not None:
                slot = self._slot_of.pop((each.from_rank, each.leaver))
                self._empty.setdefault(each.from_rank, deque()).append(slot)
                frees.append(slot)
        return LayerStep(tuple(sorted(fills)), tuple(sorted(frees)))


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
