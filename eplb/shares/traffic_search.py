"""Compiled search of ``traffic.py``: replicas trade places so that fewer tokens cross nodes.

Pairs of slots on different nodes are looked at in order, and traded where imbalance and crossing
together gain enough for the moves it takes, until a whole round changes nothing.

Shapes:  L MoE layers, T windows, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb.core.jit import jit
from eplb.core.kernels import BoolArray, FloatArray, IntArray, Ranks

ROUNDS = 4  # the first finds nearly all
ROUNDING = 1e-9  # a gain below it is none


class Ground(NamedTuple):
    """Where slots are, and what must stay."""

    ranks: Ranks
    node: IntArray  # [R]
    ready: BoolArray  # [R] ranks that others may move to and from
    stays: BoolArray  # [L, E] experts that do not move


class Toll(NamedTuple):
    """What crossing costs, and what may be paid to avoid it."""

    starts: FloatArray  # [N] part of the tokens that starts on each node
    heat: FloatArray  # [L, E] part of the tokens of each expert
    price: float  # of all tokens crossing, in imbalance
    min_gain: float  # for each move
    most_moves: int  # -1: any number


class Seat(NamedTuple):
    """One layer while replicas trade places."""

    work: FloatArray  # [T, E]
    held: IntArray  # [S]
    rank: IntArray  # [S]
    replicas: FloatArray  # [E]
    on_rank: BoolArray  # [R, E]
    on_node: FloatArray  # [N, E] replicas
    time: FloatArray  # [T, R]
    home: BoolArray  # [R, E] where the base has each expert
    saved: FloatArray  # [S, N] part of the layer's tokens that stays when a slot's replica goes


@jit
def settle_near(
    work: FloatArray, held: IntArray, base: IntArray, ground: Ground, toll: Toll
) -> int:
    """Improve ``held`` [L, S] in place; how many moves from ``base`` [L, S] it is then.

    Args:
        work: [L, T, E] as ``Problem.scaled``.
        held: experts by slot, -1 for empty.
        base: what serves; ``held`` itself when moves are free.
        ground: where slots are.
        toll: what crossing costs.
    """
    seats = [_seat(work[layer], held[layer], base[layer], ground) for layer in range(len(held))]
    moves = 0
    for seat in seats:
        moves += _num_moves(seat)
    for layer in range(len(held)):
        for slot in range(held.shape[1]):
            _value(seats[layer], slot, ground, toll, layer)
        for _ in range(ROUNDS):
            before = moves
            moves, traded = _round(seats[layer], layer, ground, toll, before)
            if not traded:
                break
    return moves


@jit
def _round(seat: Seat, layer: int, ground: Ground, toll: Toll, moves: int) -> tuple[int, bool]:
    """Trade each pair that pays; how many moves there are then, and whether any pair did."""
    traded = False
    saved, held, node_of = seat.saved, seat.held, ground.node[seat.rank]
    for one in range(len(held)):
        for other in range(one + 1, len(held)):
            stays = saved[one, node_of[other]] + saved[other, node_of[one]]
            if toll.price * stays <= ROUNDING:
                continue
            pays, more = _judge(seat, layer, (one, other), ground, toll, moves, stays)
            if pays:
                _trade(seat, (one, other), ground, toll, layer)
                moves += more
                traded = True
    return moves, traded


@jit
def _seat(work: FloatArray, held: IntArray, base: IntArray, ground: Ground) -> Seat:
    num_windows, num_experts = work.shape
    num_ranks = len(ground.node)
    rank = np.empty(len(held), dtype=np.int64)
    count = np.zeros(num_experts)
    on_rank = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    home = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    on_node = np.zeros((ground.node.max() + 1, num_experts))
    for number in range(num_ranks):
        for slot in range(ground.ranks.first_slot[number], ground.ranks.first_slot[number + 1]):
            rank[slot] = number
            if held[slot] >= 0:
                count[held[slot]] += 1
                on_rank[number, held[slot]] = True
                on_node[ground.node[number], held[slot]] += 1
            if base[slot] >= 0:
                home[number, base[slot]] = True
    time = np.zeros((num_windows, num_ranks))
    for slot in range(len(held)):
        if held[slot] >= 0:
            part = work[:, held[slot]] / count[held[slot]]
            time[:, rank[slot]] += part * ground.ranks.slowness[rank[slot]]
    saved = np.zeros((len(held), len(on_node)))
    return Seat(work, held, rank, count, on_rank, on_node, time, home, saved)


@jit
def _num_moves(seat: Seat) -> int:
    moves = 0
    for slot in range(len(seat.held)):
        if seat.held[slot] >= 0 and not seat.home[seat.rank[slot], seat.held[slot]]:
            moves += 1
    return moves


@jit
def _judge(
    seat: Seat,
    layer: int,
    slots: tuple[int, int],
    ground: Ground,
    toll: Toll,
    moves: int,
    stays: float,
) -> tuple[bool, int]:
    """Whether a trade that keeps so much of the tokens pays, and how many moves it adds."""
    if not _may_trade(seat, layer, slots, ground):
        return False, 0
    here, there = seat.rank[slots[0]], seat.rank[slots[1]]
    first, second = seat.held[slots[0]], seat.held[slots[1]]
    more = 0
    if first >= 0:
        more += int(seat.home[here, first]) - int(seat.home[there, first])
    if second >= 0:
        more += int(seat.home[there, second]) - int(seat.home[here, second])
    gain, needed = toll.price * stays, toll.min_gain * max(more, 0) + ROUNDING
    is_dear = toll.most_moves >= 0 and more > 0 and moves + more > toll.most_moves
    if gain <= needed or is_dear:
        return False, 0
    return gain - _slower(seat, slots, ground.ranks) > needed, more


@jit
def _may_trade(seat: Seat, layer: int, slots: tuple[int, int], ground: Ground) -> bool:
    one, other = slots
    here, there = seat.rank[one], seat.rank[other]
    first, second = seat.held[one], seat.held[other]
    if first == second or not (ground.ready[here] and ground.ready[there]):
        return False
    zone, room = ground.ranks.zone, ground.ranks.room
    # Another zone is another node of groups that stay: those never trade.
    if zone[here] < 0 or zone[here] != zone[there]:
        return False
    for slot, rank in ((one, here), (other, there)):
        row = room[layer if len(room) > 1 else 0]
        if slot - ground.ranks.first_slot[rank] >= row[rank]:
            return False
    if first >= 0 and (ground.stays[layer, first] or seat.on_rank[there, first]):
        return False
    return not (second >= 0 and (ground.stays[layer, second] or seat.on_rank[here, second]))


@jit
def _value(seat: Seat, slot: int, ground: Ground, toll: Toll, layer: int) -> None:
    """Fill in what it would save if the replica in a slot went to each node."""
    expert, away = seat.held[slot], ground.node[seat.rank[slot]]
    seat.saved[slot] = 0.0
    if expert < 0:
        return
    count, starts, on_node = seat.replicas[expert], toll.starts, seat.on_node
    less = min(starts[away], on_node[away, expert] / count)
    less -= min(starts[away], (on_node[away, expert] - 1) / count)
    for to in range(len(starts)):
        if to != away:
            more = min(starts[to], (on_node[to, expert] + 1) / count)
            more -= min(starts[to], on_node[to, expert] / count)
            seat.saved[slot, to] = toll.heat[layer, expert] * (more - less)


@jit
def _slower(seat: Seat, slots: tuple[int, int], ranks: Ranks) -> float:
    """By how much the mean over windows of the busiest rank's time rises."""
    one, other = slots
    here, there = seat.rank[one], seat.rank[other]
    first, second = seat.held[one], seat.held[other]
    rise = 0.0
    for window in range(len(seat.work)):
        load = 0.0  # that goes from here to there
        if first >= 0:
            load += seat.work[window, first] / seat.replicas[first]
        if second >= 0:
            load -= seat.work[window, second] / seat.replicas[second]
        before, after = 0.0, 0.0
        for rank in range(seat.time.shape[1]):
            time = seat.time[window, rank]
            before = max(before, time)
            if rank == here:
                time -= load * ranks.slowness[rank]
            elif rank == there:
                time += load * ranks.slowness[rank]
            after = max(after, time)
        rise += after - before
    return rise / len(seat.work)


@jit
def _trade(seat: Seat, slots: tuple[int, int], ground: Ground, toll: Toll, layer: int) -> None:
    one, other = slots
    for slot, to in ((one, seat.rank[other]), (other, seat.rank[one])):
        expert, away = seat.held[slot], seat.rank[slot]
        if expert < 0:
            continue
        seat.on_rank[away, expert] = False
        seat.on_rank[to, expert] = True
        seat.on_node[ground.node[away], expert] -= 1
        seat.on_node[ground.node[to], expert] += 1
        part = seat.work[:, expert] / seat.replicas[expert]
        seat.time[:, away] -= part * ground.ranks.slowness[away]
        seat.time[:, to] += part * ground.ranks.slowness[to]
    seat.held[one], seat.held[other] = seat.held[other], seat.held[one]
    for slot in range(len(seat.held)):
        if seat.held[slot] == seat.held[one] or seat.held[slot] == seat.held[other]:
            _value(seat, slot, ground, toll, layer)
