"""Single moves: the weights that differ between two placements, and the source of each.

Shapes:  L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from eplb.core.placement import EMPTY, Placement, changed_slots
from eplb.core.topology import Topology
from eplb.errors import MigrationError


class Source(IntEnum):
    """The source of a move's bytes, cheapest first."""

    SAME_RANK = 0  # another slot of the receiving rank
    PEER = 1  # a slot of another rank that the receiver can read from
    HOST = 2  # the host cache of the receiver's host
    DISK = 3  # the checkpoint: preload fills the host cache first


@dataclass(frozen=True, order=True)
class Move:
    """A copy of one expert's weights into one slot."""

    layer: int
    expert: int
    dst_slot: int
    source: Source
    src_slot: int = EMPTY  # for SAME_RANK and PEER


LINKS = ("same_rank", "node", "network", "host")  # kinds of link over which bytes move


def link_of(move: Move, topology: Topology) -> str:
    """The kind of link over which a move's bytes are copied: one of LINKS."""
    if move.source is Source.SAME_RANK:
        return "same_rank"
    if move.source is not Source.PEER:
        return "host"
    same_node = topology.node_of_slot[move.src_slot] == topology.node_of_slot[move.dst_slot]
    return "node" if same_node else "network"


class Sourcing:
    """Selects the source of each move, and counts the moves of each sender.

    Peers that hold an expert send it in turn, so that no single one sends to every receiver.
    """

    def __init__(self, topology: Topology) -> None:
        # Lists: one element of an array takes several times as long, and there are thousands.
        self._rank_of_slot: list[int] = topology.rank_of_slot.tolist()
        self._host_of_rank: list[int] = topology.host_of_rank.tolist()
        self._alive: list[bool] = topology.alive.tolist()
        self._sent: Counter[int] = Counter()  # moves sent by each rank so far, over all layers

    def readable(self, slot: int, holders: Iterable[int]) -> list[int]:
        """Slots of ``holders`` that the rank of ``slot`` can read: on live ranks of its host."""
        rank_of_slot, host_of_rank = self._rank_of_slot, self._host_of_rank
        host = host_of_rank[rank_of_slot[slot]]
        return [
            holder
            for holder in holders
            if host_of_rank[rank_of_slot[holder]] == host and self._alive[rank_of_slot[holder]]
        ]

    def move(self, layer: int, expert: int, slot: int, holders: Sequence[int]) -> Move:
        """The move of an expert into a slot, from its own rank, a peer, or else the host cache."""
        rank_of_slot = self._rank_of_slot
        for holder in holders:
            if rank_of_slot[holder] == rank_of_slot[slot]:
                return Move(layer, expert, slot, Source.SAME_RANK, holder)
        near = self.readable(slot, holders)
        if not near:
            return Move(layer, expert, slot, Source.HOST)
        holder = min(near, key=lambda h: (self._sent[rank_of_slot[h]], h))
        self._sent[rank_of_slot[holder]] += 1
        return Move(layer, expert, slot, Source.PEER, holder)


def moves_between(base: Placement, target: Placement, topology: Topology) -> list[Move]:
    """Every move from ``base`` to ``target``, each with its source.

    The source is the receiver's own rank if it holds the expert, else a peer on its host, since
    peers read each other's slots through memory, else the host cache.

    Raises:
        MigrationError: the two placements differ in shape.
    """
    if base.slot_to_expert.shape != target.slot_to_expert.shape:
        raise MigrationError(
            f"the base placement has shape {base.slot_to_expert.shape}, "
            f"the target {target.slot_to_expert.shape}, expected the same"
        )
    sourcing = Sourcing(topology)
    changed = changed_slots(base, target)
    moves = []
    for layer in np.flatnonzero(changed.any(axis=1)).tolist():
        holders = defaultdict[int, list[int]](list)  # slots of each expert before
        for slot, expert in enumerate(base.slot_to_expert[layer].tolist()):
            holders[expert].append(slot)
        arriving: list[int] = target.slot_to_expert[layer].tolist()
        for slot in np.flatnonzero(changed[layer]).tolist():
            expert = arriving[slot]
            moves.append(sourcing.move(layer, expert, slot, holders[expert]))
    return moves


def rounds_of(moves: Iterable[Move], topology: Topology) -> tuple[tuple[Move, ...], ...]:
    """Divide moves into rounds in which no rank receives twice and no rank sends twice."""
    rank_of_slot: list[int] = topology.rank_of_slot.tolist()
    rounds: list[list[Move]] = []
    receives, sends = defaultdict[int, int](int), defaultdict[int, int](int)  # a bit for each round
    for move in moves:
        receiver, is_sent = rank_of_slot[move.dst_slot], move.source is Source.PEER
        sender = rank_of_slot[move.src_slot] if is_sent else EMPTY
        taken = receives[receiver] | (sends[sender] if is_sent else 0)
        first_free = ~taken & (taken + 1)
        number = first_free.bit_length() - 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(move)
        receives[receiver] |= first_free
        if is_sent:
            sends[sender] |= first_free
    return tuple(tuple(one_round) for one_round in rounds)
