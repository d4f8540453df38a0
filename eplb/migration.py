"""From one placement to the next: which weights move where, in what order, and what swaps together.

Everything that ranks must agree on is frozen in a Migration: the layers of each transaction, their
order, the rounds, and the pace. Ranks that could change any of it while it runs would swap
different layers at the same step and mix two placements.

    Migration -> transactions (layers that swap together) -> rounds (no rank sends twice)

Shapes:  L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from eplb.errors import MigrationError
from eplb.placement import EMPTY, Placement, check_fits
from eplb.topology import Topology


class Source(IntEnum):
    """Where a move's bytes come from, cheapest first."""

    SAME_RANK = 0  # another slot of the receiving rank
    PEER = 1  # a slot of another rank that the receiver can read from
    HOST = 2  # the preload slab of the receiver's host
    DISK = 3  # the checkpoint: preload fills the host slab first


@dataclass(frozen=True, order=True)
class Move:
    """One expert's weights into one slot."""

    layer: int
    expert: int
    dst_slot: int
    source: Source
    src_slot: int = EMPTY  # for SAME_RANK and PEER


@dataclass(frozen=True)
class Transaction:
    """The layers that swap together at one step, and their moves in contention-free rounds."""

    layers: tuple[int, ...]
    rounds: tuple[tuple[Move, ...], ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves, round by round."""
        return tuple(move for one_round in self.rounds for move in one_round)


@dataclass(frozen=True)
class Pace:
    """How much moves at a time; frozen in each Migration.

    ``staging_experts`` is the size of every rank's staging ring, in experts. A transaction never
    needs more on any rank, so staging cannot run out.
    """

    staging_experts: int = 16
    transactions_per_commit: int = 1


@dataclass(frozen=True, eq=False)
class Migration:
    """A published way from ``base`` to ``target``.

    No layer is in two transactions: a slot that one transaction reads is never written by an
    earlier one of the same migration.
    """

    plan_id: int  # only grows; a leader that reuses one is told apart by the hash
    base: Placement
    target: Placement
    transactions: tuple[Transaction, ...]
    pace: Pace

    @cached_property
    def hash(self) -> str:
        """Hex digest of all that ranks must agree on."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.plan_id, self.base.generation, self.pace)).encode())
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
        """The placement that serves once the first ``num_transactions`` are applied."""
        done = [layer for txn in self.transactions[:num_transactions] for layer in txn.layers]
        return self.base.with_layers(self.target, done)


def moves_between(base: Placement, target: Placement, topology: Topology) -> list[Move]:
    """Every weight that must move to get from ``base`` to ``target``, each with its source.

    The source is the receiver's own rank if it holds the expert, else a peer on its host, since
    peers read each other's slots through memory, else the host's slab. Peers that hold an expert
    take turns, so that no single one feeds every receiver.

    Raises:
        MigrationError: the two placements differ in shape.
    """
    if base.slot_to_expert.shape != target.slot_to_expert.shape:
        raise MigrationError(
            f"the base placement has shape {base.slot_to_expert.shape}, "
            f"the target {target.slot_to_expert.shape}, expected the same"
        )
    changed = np.argwhere(
        (base.slot_to_expert != target.slot_to_expert) & (target.slot_to_expert != EMPTY)
    )
    sent: Counter[int] = Counter()  # moves fed by each rank so far, over all layers
    moves = []
    for layer, slot in changed.tolist():
        expert = int(target.slot_to_expert[layer, slot])
        holders = np.flatnonzero(base.slot_to_expert[layer] == expert).tolist()
        moves.append(_sourced(layer, expert, slot, holders, topology, sent))
    return moves


def _sourced(
    layer: int, expert: int, slot: int, holders: list[int], topology: Topology, sent: Counter[int]
) -> Move:
    rank_of_slot, host_of_rank = topology.rank_of_slot, topology.host_of_rank
    receiver = int(rank_of_slot[slot])
    for holder in holders:
        if rank_of_slot[holder] == receiver:
            return Move(layer, expert, slot, Source.SAME_RANK, holder)
    near = [h for h in holders if host_of_rank[rank_of_slot[h]] == host_of_rank[receiver]]
    near = [h for h in near if topology.alive[rank_of_slot[h]]]
    if not near:
        return Move(layer, expert, slot, Source.HOST)
    holder = min(near, key=lambda h: (sent[int(rank_of_slot[h])], h))
    sent[int(rank_of_slot[holder])] += 1
    return Move(layer, expert, slot, Source.PEER, holder)


def build_migration(
    base: Placement,
    target: Placement,
    topology: Topology,
    *,
    plan_id: int,
    pace: Pace | None = None,
) -> Migration:
    """Group the moves into transactions that fit the staging ring, and each into rounds.

    Layers that change only their shares need no bytes and ride along in the first transaction.

    Raises:
        MigrationError: one layer alone needs more staging than a rank has.
        PlacementError: the target does not fit the topology.
    """
    pace = pace or Pace()
    check_fits(target, topology)
    per_layer: dict[int, list[Move]] = defaultdict(list)
    for move in moves_between(base, target, topology):
        per_layer[move.layer].append(move)
    for layer in _layers_that_differ(base, target):
        per_layer.setdefault(layer, [])
    layers_of_txn = _fill_transactions(per_layer, topology, pace.staging_experts)
    transactions = tuple(
        Transaction(
            tuple(sorted(layers)),
            _rounds([move for layer in sorted(layers) for move in per_layer[layer]], topology),
        )
        for layers in layers_of_txn
    )
    next_target = target.with_generation(base.generation + 1)
    return Migration(plan_id, base, next_target, transactions, pace)


def _layers_that_differ(base: Placement, target: Placement) -> list[int]:
    differs = (base.slot_to_expert != target.slot_to_expert).any(axis=1)
    differs |= (base.slot_share != target.slot_share).any(axis=1)
    if base.source_share is not target.source_share:
        for placement in (base, target):
            if placement.source_share is not None:
                differs |= True
    return [int(layer) for layer in np.flatnonzero(differs)]


def _fill_transactions(
    per_layer: dict[int, list[Move]], topology: Topology, staging_experts: int
) -> list[list[int]]:
    """Put layers together, in layer order, while every rank's moves still fit its ring."""
    transactions: list[list[int]] = []
    used: Counter[int] = Counter()
    for layer in sorted(per_layer):
        need = Counter(int(topology.rank_of_slot[move.dst_slot]) for move in per_layer[layer])
        for rank, count in need.items():
            if count > staging_experts:
                raise MigrationError(
                    f"layer {layer} moves {count} experts into rank {rank}, "
                    f"expected at most {staging_experts}, the size of the staging ring"
                )
        fits = all(used[rank] + count <= staging_experts for rank, count in need.items())
        if not transactions or not fits:
            transactions.append([])
            used = Counter()
        transactions[-1].append(layer)
        used.update(need)
    return transactions


def _rounds(moves: Sequence[Move], topology: Topology) -> tuple[tuple[Move, ...], ...]:
    """Spread moves over rounds in which no rank receives twice and no rank sends twice."""
    rounds: list[list[Move]] = []
    busy: list[set[tuple[str, int]]] = []
    for move in moves:
        ends = {("receives", int(topology.rank_of_slot[move.dst_slot]))}
        if move.source is Source.PEER:
            ends.add(("sends", int(topology.rank_of_slot[move.src_slot])))
        for taken, one_round in zip(busy, rounds, strict=True):
            if not taken & ends:
                taken |= ends
                one_round.append(move)
                break
        else:
            busy.append(set(ends))
            rounds.append([move])
    return tuple(tuple(one_round) for one_round in rounds)
