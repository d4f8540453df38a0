"""Migrations from one placement to the next: moves, their order, and the layers that swap together.

Everything that ranks must agree on is frozen in a Migration: the layers of each transaction, their
order, the rounds, and the pace. If ranks could change any of it during the migration, they would
swap different layers at the same step and mix two placements.

Each move has a source. Moves are grouped by layers that swap together, in copy mode and in flip
mode, and each group into rounds in which no rank sends or receives twice.

    Migration -> transactions (layers that swap together) -> rounds (no rank sends twice)

Shapes:  L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement, changed_slots, check_fits
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError
from eplb.migration.spares import (
    LayerStep,
    compact,
    expand,
    intermediate_placement,
    steps_towards,
    take,
)


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


Mode = Literal["copy", "flip"]


@dataclass(frozen=True)
class Transaction:
    """The layers that swap together at one step, and their moves in contention-free rounds."""

    layers: tuple[int, ...]
    rounds: tuple[tuple[Move, ...], ...]
    # How many transactions of the migration must be complete on every rank before this one's bytes
    # may be staged: an earlier one fills a slot that is read, or frees one that is written.
    reads_after: int = 0
    frees: tuple[tuple[int, int], ...] = ()  # (layer, slot) that become EMPTY; flip mode only

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves, round by round."""
        return tuple(move for one_round in self.rounds for move in one_round)


@dataclass(frozen=True)
class Pace:
    """The mode of a migration, and how much it moves at a time; frozen in each Migration.

    copy: bytes go to the staging ring and are copied into live slots at the swap. A transaction
    takes at most half of ``staging_experts``, the ring's size, on any rank, so that the next one is
    staged during its vote. A single layer may take the whole ring.

    flip: bytes go into EMPTY slots, of which every rank keeps ``spare_slots`` in each layer; the
    swap changes nothing but the routing table.

    A swap copies the experts of at most ``transactions_per_commit`` transactions between two steps.
    ``eplb.decision.pace`` lowers transactions and links together.

    Raises:
        ConfigError: an unknown mode, flip mode without spares, or a figure out of range.
    """

    staging_experts: int = 16
    transactions_per_commit: int = 2  # at most: as much as the whole ring, where links are fast
    mode: Mode = "copy"
    spare_slots: int = 0
    layers_per_transaction: int = 0  # at most; 0: as many as fit
    # Experts that a transaction brings to a rank, at most, unless one layer alone has more; 0: half
    # of staging_experts. Copy mode only.
    experts_per_transaction: int = 0
    link_part: float = 1.0  # part of the budget of each of a rank's links that staging may use

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"pace: mode is {self.mode!r}, expected 'copy' or 'flip'")
        least = {"transactions_per_commit": 1, "layers_per_transaction": 0, "spare_slots": 0}
        least |= {"experts_per_transaction": 0}
        least |= {"spare_slots": 1} if self.mode == "flip" else {}
        for name, limit in least.items():
            found = getattr(self, name)
            if found < limit:
                raise ConfigError(
                    f"pace: {name} is {found}, expected {limit} or more in {self.mode} mode"
                )
        if not 0 < self.link_part <= 1:
            raise ConfigError(
                f"pace: link_part is {self.link_part}, expected more than 0 and at most 1"
            )


def copy_transactions(
    base: Placement, target: Placement, topology: Topology, pace: Pace
) -> tuple[Transaction, ...]:
    """Transactions whose bytes fit the staging ring."""
    per_layer: dict[int, list[Move]] = defaultdict(list)
    for move in moves_between(base, target, topology):
        per_layer[move.layer].append(move)
    for layer in _layers_that_differ(base, target):
        per_layer.setdefault(layer, [])
    return tuple(
        Transaction(
            tuple(layers),
            rounds_of((move for layer in layers for move in per_layer[layer]), topology),
        )
        for layers in _fill_transactions(per_layer, topology, pace)
    )


def _layers_that_differ(base: Placement, target: Placement) -> list[int]:
    differs = (base.slot_to_expert != target.slot_to_expert).any(axis=1)
    differs |= (base.slot_share != target.slot_share).any(axis=1)
    if base.source_share is not target.source_share:
        for placement in (base, target):
            if placement.source_share is not None:
                differs |= True
    return [int(layer) for layer in np.flatnonzero(differs)]


def _fill_transactions(
    per_layer: dict[int, list[Move]], topology: Topology, pace: Pace
) -> list[list[int]]:
    """Group layers, in layer order, while the moves of every rank fit its part of the ring."""
    rank_of_slot: list[int] = topology.rank_of_slot.tolist()
    transactions: list[list[int]] = []
    used: Counter[int] = Counter()
    room, most_layers = pace.staging_experts, pace.layers_per_transaction or len(per_layer)
    shared_room = min(room // 2, pace.experts_per_transaction or room)
    for layer in sorted(per_layer):
        need = Counter(rank_of_slot[move.dst_slot] for move in per_layer[layer])
        for rank, count in need.items():
            if count > room:
                raise MigrationError(
                    f"layer {layer} moves {count} experts into rank {rank}, "
                    f"expected at most {room}, the size of the staging ring"
                )
        fits = all(used[rank] + count <= shared_room for rank, count in need.items())
        if not transactions or not fits or len(transactions[-1]) == most_layers:
            transactions.append([])
            used = Counter()
        transactions[-1].append(layer)
        used.update(need)
    return transactions


def flip_transactions(
    base: Placement,
    target: Placement,
    steps: list[list[LayerStep]],
    topology: Topology,
    pace: Pace,
) -> tuple[Transaction, ...]:
    """Transactions that fill EMPTY slots: all layers' first steps, then their second, and so on."""
    flipping = _FlipBuilder(base, topology)
    layers = _layers_that_differ(base, target)
    transactions: list[Transaction] = []
    nth = 0
    while layers:
        size = pace.layers_per_transaction or len(layers)
        for first in range(0, len(layers), size):
            of_layer = {
                layer: steps[layer][nth : nth + 1] for layer in layers[first : first + size]
            }
            transactions.append(flipping.transaction(of_layer, len(transactions) + 1))
        nth += 1
        layers = [layer for layer in layers if len(steps[layer]) > nth]
    return tuple(transactions)


class _FlipBuilder:
    """The expert of each slot, and the transaction that put it there, while they are built."""

    def __init__(self, base: Placement, topology: Topology) -> None:
        self._held = base.slot_to_expert.copy()
        self._since = np.zeros(self._held.shape, dtype=np.int64)  # transactions; 0: from the base
        self._topology, self._sourcing = topology, Sourcing(topology)

    def transaction(self, steps: dict[int, list[LayerStep]], number: int) -> Transaction:
        """The ``number``-th transaction, counted from one, of at most one step of each layer."""
        moves: list[Move] = []
        frees: list[tuple[int, int]] = []
        reads_after = 0
        for layer, step in ((layer, step) for layer, one in steps.items() for step in one):
            for expert, slot in step.fills:
                move = self._move(layer, expert, slot)
                used = [slot] if move.src_slot == EMPTY else [slot, move.src_slot]
                reads_after = max(reads_after, int(self._since[layer, used].max()))
                moves.append(move)
            frees += [(layer, slot) for slot in step.frees]
            take(step, self._held[layer])
            self._since[layer, [*step.frees, *(slot for _, slot in step.fills)]] = number
        return Transaction(
            tuple(steps), rounds_of(moves, self._topology), reads_after, tuple(frees)
        )

    def _move(self, layer: int, expert: int, slot: int) -> Move:
        """The move of an expert, from the slot that holds it after the fewest transactions."""
        holders = np.flatnonzero(self._held[layer] == expert).tolist()
        near = self._sourcing.readable(slot, holders)
        soonest = min((self._since[layer, holder] for holder in near), default=0)
        near = [holder for holder in near if self._since[layer, holder] == soonest]
        return self._sourcing.move(layer, expert, slot, near)


@dataclass(frozen=True, eq=False)
class Migration:
    """A published sequence of transactions from ``base`` to ``target``.

    In copy mode no layer is in two transactions: a slot that one transaction reads is never written
    by an earlier one of the same migration. In flip mode a layer may be in several, and
    ``Transaction.reads_after`` is the number of transactions that each waits for.
    """

    plan_id: int  # only grows; two migrations with one id are distinguished by their hash
    base: Placement
    target: Placement
    transactions: tuple[Transaction, ...]
    pace: Pace
    weights_version: int = 0  # ranks with weights of another version reject it

    def __post_init__(self) -> None:
        held = self._held_after(self.transactions)
        target = self.target.slot_to_expert
        if self.pace.mode == "copy":
            held[target == EMPTY] = EMPTY  # a swap applies a whole layer of the target
        wrong = np.argwhere(held != target)
        if wrong.size:
            layer, slot = wrong[0]
            raise MigrationError(
                f"plan {self.plan_id}: its moves bring expert {held[layer, slot]} to layer {layer} "
                f"slot {slot}, expected expert {target[layer, slot]} as in its target"
            )

    def _held_after(self, transactions: tuple[Transaction, ...]) -> NDArray[np.int32]:
        """[L, S] experts by slot after these transactions, from the base on."""
        held = self.base.slot_to_expert.copy()
        for transaction in transactions:
            for layer, slot in transaction.frees:
                held[layer, slot] = EMPTY
            for move in transaction.moves:
                held[move.layer, move.dst_slot] = move.expert
        return held

    @cached_property
    def hash(self) -> str:
        """Hex digest of all that ranks must agree on."""
        digest = hashlib.blake2b(digest_size=16)
        scalars = (self.plan_id, self.base.generation, self.pace, self.weights_version)
        digest.update(repr(scalars).encode())
        digest.update(self.base.hash.encode())
        digest.update(self.target.hash.encode())
        digest.update(repr(self.transactions).encode())
        return digest.hexdigest()

    @property
    def vote_hash(self) -> int:
        """The hash as a positive 62-bit integer, the form in which ranks vote on it."""
        return int(self.hash[:16], 16) >> 2

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves in the order in which they are made."""
        return tuple(move for txn in self.transactions for move in txn.moves)

    def placement_after(self, num_transactions: int) -> Placement:
        """The placement after the first ``num_transactions`` have been applied."""
        applied = self.transactions[:num_transactions]
        touched = {layer for txn in applied for layer in txn.layers}
        if self.pace.mode == "copy":
            return self.base.with_layers(self.target, touched)
        held = self._held_after(applied)
        is_done = (held == self.target.slot_to_expert).all(axis=1)
        done = {layer for layer in touched if is_done[layer]}
        placement = self.base.with_layers(self.target, done)
        if done == touched:
            return placement
        return placement.with_layers(intermediate_placement(held, self.target), touched - done)


def build_migration(
    base: Placement,
    target: Placement,
    topology: Topology,
    *,
    plan_id: int,
    pace: Pace | None = None,
    weights_version: int = 0,
) -> Migration:
    """Group the moves into transactions, and each into rounds.

    Layers that change only their shares need no bytes; they are in transactions too. In flip mode
    experts keep the ranks that they have in ``target`` but not the slots: arriving experts go into
    slots that are EMPTY in ``base``.

    Raises:
        MigrationError: one layer alone needs more staging than a rank has.
        PlacementError: the target does not fit the topology, or a rank lacks its spares.
    """
    pace = pace or Pace()
    check_fits(target, topology)
    if pace.mode == "flip":
        smaller, _ = compact(target, topology, pace.spare_slots)
        steps = steps_towards(smaller, base, topology, pace.spare_slots)
        target = expand(smaller, base, topology, pace.spare_slots)
        transactions = flip_transactions(base, target, steps, topology, pace)
    else:
        transactions = copy_transactions(base, target, topology, pace)
    next_target = target.with_generation(base.generation + 1)
    return Migration(plan_id, base, next_target, transactions, pace, weights_version)
