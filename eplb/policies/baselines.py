"""Baseline policies: contiguous, round robin, and the hottest experts on every rank.

All are legal for any slot counts and dead ranks, and never put an expert on a rank twice. None
keeps expert groups on nodes.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import as_history
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.policies.greedy import greedy
from eplb.search.relabel import in_place


def contiguous_policy(problem: Problem) -> Placement:
    """Consecutive experts on each rank, evenly spread, redundant slots empty: no balancing.

    With as many slots as experts it is the identity.
    """
    return Placement(contiguous_slots(problem), problem.num_experts)


def contiguous_slots(problem: Problem) -> NDArray[np.int32]:
    """[L, S] of the contiguous policy."""
    room = problem.room
    if (room == room[0]).all():
        return np.repeat(_contiguous_layer(problem, room[0])[None], len(room), axis=0)
    return np.array([_contiguous_layer(problem, row) for row in room])


def _contiguous_layer(problem: Problem, room: NDArray[np.int64]) -> NDArray[np.int32]:
    """[S] for slots [R] that may be used."""
    num_experts, topology = problem.num_experts, problem.topology
    levels = np.arange(1, int(room.max()) + 1)
    level = 1 + int(np.argmax(np.minimum(room, levels[:, None]).sum(axis=1) >= num_experts))
    count = np.minimum(room, level)
    surplus = int(count.sum()) - num_experts
    count[np.flatnonzero(count == level)[::-1][:surplus]] -= 1
    place = np.arange(topology.num_slots) - np.repeat(
        topology.first_slot[:-1], topology.slots_of_rank
    )
    held = np.full(topology.num_slots, EMPTY, dtype=np.int32)
    held[place < count[topology.rank_of_slot]] = np.arange(num_experts)
    return held


def round_robin(problem: Problem) -> Placement:
    """Assign experts to live ranks in turn, again and again while slots are free.

    Does not use the load: neighbours in the model's numbering are on different ranks, and the first
    experts get the replicas. All layers are equal.

    Source of the idea: vLLM's round-robin placement (vllm-project/vllm pull request 28449).
    """
    layer = _round_robin_layer(problem.num_experts, problem.topology)
    return _kept(problem, np.tile(layer, (problem.history.num_layers, 1)))


def topk_everywhere(problem: Problem) -> Placement:
    """Put the hottest experts on every live rank, as many as slots allow; the others greedily.

    Every other expert keeps a slot, and no rank gets more than it has slots. Ranks without slots do
    not count. Remaining slots go to the next hottest experts, as in greedy.

    Source of the idea: ROCm/ATOM pull request 1210.
    """
    topology = problem.topology
    usable = topology.serving
    num_top = _num_everywhere(topology.slots_of_rank[usable], problem.num_experts)
    by_heat = np.argsort(-problem.work.sum(axis=0), axis=1, kind="stable")  # [L, E]
    held = np.full((problem.history.num_layers, topology.num_slots), EMPTY, dtype=np.int64)
    for rank in np.flatnonzero(usable):
        first = topology.first_slot[rank]
        held[:, first : first + num_top] = by_heat[:, :num_top]
    if num_top < problem.num_experts:
        _pack_the_rest(problem, held, by_heat[:, num_top:], usable)
    return _kept(problem, held)


def _num_everywhere(slots_of_rank: NDArray[np.int32], num_experts: int) -> int:
    most = min(int(slots_of_rank.min()), num_experts)
    if len(slots_of_rank) == 1:
        return most
    spare = int(slots_of_rank.sum()) - num_experts
    return min(most, spare // (len(slots_of_rank) - 1))


def _pack_the_rest(
    problem: Problem,
    held: NDArray[np.int64],
    rest: NDArray[np.int64],
    usable: NDArray[np.bool_],
) -> None:
    """Plan the experts ``rest`` [L, ...] greedily on the slots that ``held`` leaves empty."""
    topology = problem.topology
    num_top = problem.num_experts - rest.shape[1]
    slots = np.where(usable, topology.slots_of_rank - num_top, topology.slots_of_rank)
    narrow = replace(topology, slots_of_rank=slots)
    # As work, which includes each expert's cost per token.
    work = np.take_along_axis(problem.work, rest[None], axis=2)
    packed = greedy(Problem(as_history(work), narrow))
    experts = np.take_along_axis(rest, np.maximum(packed, 0), axis=1)
    for rank in range(topology.num_ranks):
        into = slice(topology.first_slot[rank + 1] - slots[rank], topology.first_slot[rank + 1])
        here = narrow.slots_on(rank)
        held[:, into] = np.where(packed[:, here] == EMPTY, EMPTY, experts[:, here])


def _round_robin_layer(num_experts: int, topology: Topology) -> NDArray[np.int64]:
    """[S] of one layer."""
    room = topology.usable_slots.tolist()
    on_rank: list[list[int]] = [[] for _ in room]
    turn = 0
    for _ in range(max(room)):  # an upper bound of the turns
        for expert in range(num_experts):
            for step in range(len(room)):
                rank = (turn + step) % len(room)
                if len(on_rank[rank]) < room[rank] and expert not in on_rank[rank]:
                    on_rank[rank].append(expert)
                    turn = rank + 1
                    break
    held = np.full(topology.num_slots, EMPTY, dtype=np.int64)
    for rank, experts in enumerate(on_rank):
        first = int(topology.first_slot[rank])
        held[first : first + len(experts)] = experts
    return held


def _kept(problem: Problem, held: NDArray[np.int64]) -> Placement:
    """As a placement; experts that stay on a rank stay in their slots there."""
    if problem.current is not None:
        held = in_place(held, problem.current.slot_to_expert, problem.topology)
    return Placement(held.astype(np.int32), problem.num_experts)
