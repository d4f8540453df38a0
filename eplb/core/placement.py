"""Which expert each slot holds, and what share of its tokens each slot gets.

A placement is one array, ``slot_to_expert``, and the shares beside it. Everything else (replica
counts, the inverse map, loads per rank) is derived, so two views of a placement cannot disagree.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import UNSET, freeze, owned, owned_whole, unset
from eplb.core.topology import Topology
from eplb.errors import PlacementError

EMPTY = -1  # a slot without an expert: a spare, a slot of a dead rank, or one that a layer leaves
MOST_GENERATIONS = 2**62  # far beyond any use, and exact in every store
MOST_EXPERTS = 2**20  # of a layer; published models have some hundreds
SHARE_TOLERANCE = 1e-6  # float64 shares of one expert must sum to 1 within this


@dataclass(frozen=True, eq=False)
class Placement:
    """The expert of each slot, and the share of its tokens that each slot gets.

    Raises:
        PlacementError: an id out of range, an expert without a slot, or shares that do not
            sum to 1.
    """

    slot_to_expert: NDArray[np.int32]  # [L, S], EMPTY where a slot holds nothing
    num_experts: int
    generation: int = 0  # number of the committed placement; only grows
    slot_share: NDArray[np.float64] = field(default_factory=unset)  # [L, S]; default: equal split
    source_share: NDArray[np.float64] | None = None  # [N, L, S], the same per source node

    def __post_init__(self) -> None:
        held = owned_whole("slot_to_expert", self.slot_to_expert, PlacementError)
        for name in ("num_experts", "generation"):
            if not isinstance(found := getattr(self, name), int | np.integer):
                raise PlacementError(f"{name} is {found!r}, expected a whole number")
        if not 0 <= self.generation <= MOST_GENERATIONS:
            raise PlacementError(
                f"generation is {self.generation}, expected 0..{MOST_GENERATIONS:,}"
            )
        if not 0 <= self.num_experts <= MOST_EXPERTS:
            raise PlacementError(f"num_experts is {self.num_experts}, expected 0..{MOST_EXPERTS:,}")
        if held.ndim != 2:
            raise PlacementError(f"slot_to_expert has shape {held.shape}, expected [layers, slots]")
        freeze(self, slot_to_expert=held)
        self._check_ids()
        if self.slot_share is UNSET:
            freeze(self, slot_share=self._equal_share())  # right by construction
        else:
            freeze(self, slot_share=owned(self.slot_share, np.float64))
            _check_shares("slot_share", self.slot_share, self)
        if self.source_share is not None:
            per_source = owned(self.source_share, np.float64)
            freeze(self, source_share=per_source)
            if per_source.ndim != 3:
                raise PlacementError(
                    f"source_share has shape {per_source.shape}, expected [nodes, layers, slots]"
                )
            for node, share_from_node in enumerate(per_source):
                _check_shares(f"source_share of node {node}", share_from_node, self)

    def _check_ids(self) -> None:
        held = self.slot_to_expert
        if held.size and (held.min() < EMPTY or held.max() >= self.num_experts):
            layer, slot = np.argwhere((held < EMPTY) | (held >= self.num_experts))[0]
            raise PlacementError(
                f"layer {layer} slot {slot} holds expert {held[layer, slot]}, "
                f"expected 0..{self.num_experts - 1}, or {EMPTY} for an empty slot"
            )
        if not self.replica_count.all():
            layer, expert = np.argwhere(self.replica_count == 0)[0]
            raise PlacementError(f"layer {layer}: expert {expert} has no slot")

    @property
    def has_equal_shares(self) -> bool:
        """Whether replicas of an expert have equal shares, which need not be written."""
        return np.array_equal(self.slot_share, self._equal_share())

    def _equal_share(self) -> NDArray[np.float64]:
        # The extra first column is for the empty slots; a flat lookup is many times faster than
        # take_along_axis.
        by_expert = np.zeros((self.num_layers, self.num_experts + 1))
        np.divide(1.0, self.replica_count, out=by_expert[:, 1:])
        share: NDArray[np.float64] = by_expert.ravel()[_places(self.slot_to_expert, by_expert)]
        share.flags.writeable = False
        return share

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.slot_to_expert)

    @property
    def num_slots(self) -> int:
        """S."""
        _, num_slots = self.slot_to_expert.shape
        return int(num_slots)

    @cached_property
    def replica_count(self) -> NDArray[np.int32]:
        """[L, E] how many slots hold each expert."""
        return owned(by_expert(self.slot_to_expert, self.num_experts, None), np.int32)

    @cached_property
    def expert_to_slots(self) -> NDArray[np.int32]:
        """[L, E, Rmax] slots of each expert, lowest first, padded with EMPTY."""
        most = int(self.replica_count.max())
        slots = np.full((self.num_layers, self.num_experts, most), EMPTY, dtype=np.int32)
        filled = np.zeros((self.num_layers, self.num_experts), dtype=np.int64)
        for slot in range(self.num_slots):
            layers = np.flatnonzero(self.slot_to_expert[:, slot] != EMPTY)
            experts = self.slot_to_expert[layers, slot]
            slots[layers, experts, filled[layers, experts]] = slot
            filled[layers, experts] += 1
        return owned(slots, np.int32)

    @cached_property
    def hash(self) -> str:
        """Hex digest of experts and shares; ranks with the same hash route in the same way."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([*self.slot_to_expert.shape, self.num_experts]).tobytes())
        digest.update(self.slot_to_expert.tobytes())
        digest.update(self.slot_share.tobytes())
        if self.source_share is not None:
            digest.update(self.source_share.tobytes())
        return digest.hexdigest()

    def of_layers(self, layers: NDArray[np.intp]) -> Placement:
        """Some layers of this placement."""
        return replace(
            self,
            slot_to_expert=self.slot_to_expert[layers],
            slot_share=self.slot_share[layers],
            source_share=None if self.source_share is None else self.source_share[:, layers],
        )

    def with_layers(self, other: Placement, layers: Iterable[int]) -> Placement:
        """This placement with some layers of ``other``: the state in the middle of a migration.

        Keeps this placement's generation, because a migration commits after its last layer.
        """
        if other.slot_to_expert.shape != self.slot_to_expert.shape:
            raise PlacementError(
                f"the other placement has shape {other.slot_to_expert.shape}, "
                f"expected {self.slot_to_expert.shape}"
            )
        chosen = sorted(layers)
        held, share = self.slot_to_expert.copy(), self.slot_share.copy()
        held[chosen], share[chosen] = other.slot_to_expert[chosen], other.slot_share[chosen]
        by_source, theirs = self.source_share, other.source_share
        if by_source is not None or theirs is not None:
            # A side without shares per source has the same share from every node.
            mine = self.slot_share[None] if by_source is None else by_source
            num_nodes = len(mine if theirs is None else theirs)
            by_source = np.repeat(mine, num_nodes // len(mine), axis=0)
            by_source[:, chosen] = other.slot_share[chosen] if theirs is None else theirs[:, chosen]
        return Placement(held, self.num_experts, self.generation, share, by_source)

    def with_shares(
        self, share: NDArray[np.float64], source_share: NDArray[np.float64] | None = None
    ) -> Placement:
        """The same experts and generation with other shares."""
        return replace(self, slot_share=share, source_share=source_share)

    def with_generation(self, generation: int) -> Placement:
        """The same experts and shares under another generation number."""
        return self if generation == self.generation else replace(self, generation=generation)


def by_expert(
    held: NDArray[np.int32], num_experts: int, weights: NDArray[np.float64] | None
) -> NDArray[np.float64] | NDArray[np.intp]:
    """[L, E] how many slots hold each expert, or the sum of their weights [L, S]."""
    # The extra first column collects the empty slots. A bincount is many times faster than
    # np.add.at on pairs of indices.
    table = np.empty((len(held), num_experts + 1))
    flat = None if weights is None else weights.ravel()
    summed = np.bincount(_places(held, table).ravel(), flat, table.size)
    return summed.reshape(table.shape)[:, 1:]


def _places(held: NDArray[np.int32], table: NDArray[np.float64]) -> NDArray[np.int64]:
    """[L, S] where each slot's expert is in a flat table [L, 1 + E]."""
    num_layers, columns = table.shape
    places: NDArray[np.int64] = held + (1 + columns * np.arange(num_layers)[:, None])
    return places


def whole_shares(
    held: NDArray[np.int32], share: NDArray[np.float64], num_experts: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[L, S] shares in proportion to those given, which sum to 1; [L, E] experts without a slot.

    The replicas of an expert share alike where none of them has a share.
    """
    count = by_expert(held, num_experts, None)
    total = by_expert(held, num_experts, np.where(held == EMPTY, 0.0, share))
    mine = np.maximum(held, 0)
    sums, counts = (np.take_along_axis(table, mine, axis=1) for table in (total, count))
    whole = np.where(sums > 0, share / np.maximum(sums, 1e-300), 1.0 / np.maximum(counts, 1))
    return np.where(held != EMPTY, whole, 0.0), np.asarray(count == 0)


def _check_shares(name: str, share: NDArray[np.float64], placement: Placement) -> None:
    held = placement.slot_to_expert
    if share.shape != held.shape:
        raise PlacementError(f"{name} has shape {share.shape}, expected {held.shape}")
    wrong = np.argwhere(~((share >= 0) & (share <= 1)) | ((held == EMPTY) & (share != 0)))
    if wrong.size:
        layer, slot = wrong[0]
        raise PlacementError(
            f"{name}: layer {layer} slot {slot} has {share[layer, slot]}, "
            "expected 0..1, and 0 for an empty slot"
        )
    total = by_expert(held, placement.num_experts, share)
    off = np.argwhere(np.abs(total - 1.0) > SHARE_TOLERANCE)
    if off.size:
        layer, expert = off[0]
        raise PlacementError(
            f"{name}: the shares of expert {expert} in layer {layer} sum to "
            f"{total[layer, expert]:.6g}, expected 1"
        )


def check_fits(placement: Placement, topology: Topology) -> None:
    """Check that this topology can serve a placement.

    Raises:
        PlacementError: another number of slots, two replicas of an expert on one rank, or an
            expert on a rank that is not alive.
    """
    if placement.num_slots != topology.num_slots:
        raise PlacementError(
            f"the placement has {placement.num_slots} slots a layer, "
            f"the topology has {topology.num_slots}"
        )
    duplicates = duplicate_replicas(placement, topology)
    if duplicates.size:
        layer, rank, expert = duplicates[0]
        raise PlacementError(f"layer {layer}: rank {rank} holds expert {expert} more than once")
    dead = ~topology.alive[topology.rank_of_slot]
    stranded = np.argwhere(placement.slot_to_expert[:, dead] != EMPTY)
    if stranded.size:
        layer, column = stranded[0]
        slot = int(np.flatnonzero(dead)[column])
        raise PlacementError(
            f"layer {layer} slot {slot} holds expert {placement.slot_to_expert[layer, slot]} "
            f"on rank {topology.rank_of_slot[slot]}, which is not alive"
        )


def check_sources(placement: Placement, topology: Topology) -> None:
    """Check that shares by source node, where a placement has them, are for these nodes.

    Raises:
        PlacementError: another number of nodes.
    """
    by_source = placement.source_share
    if by_source is not None and len(by_source) != topology.num_nodes:
        raise PlacementError(
            f"source_share is for {len(by_source)} nodes, expected {topology.num_nodes} as in the "
            "topology"
        )


def changed_slots(base: Placement, target: Placement) -> NDArray[np.bool_]:
    """[L, S] slots that hold another expert in ``target``; a slot that becomes empty is none."""
    held = target.slot_to_expert
    changed: NDArray[np.bool_] = (base.slot_to_expert != held) & (held != EMPTY)
    return changed


def duplicate_replicas(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[D, 3] (layer, rank, expert) for every expert that a rank holds more than once.

    A second replica on the same rank balances nothing and wastes the memory of a slot
    (deepseek-ai/EPLB issue 22).
    """
    shape = (placement.num_layers, topology.num_ranks, placement.num_experts)
    layer, slot = np.nonzero(placement.slot_to_expert != EMPTY)
    expert = placement.slot_to_expert[layer, slot]
    place = np.ravel_multi_index((layer, topology.rank_of_slot[slot], expert), shape)
    found, count = np.unique(place, return_counts=True)
    return np.stack(np.unravel_index(found[count > 1], shape), axis=1)


def moves_per_layer(base: Placement, target: Placement) -> NDArray[np.int64]:
    """[L] weights that must move from ``base`` to ``target``."""
    per_layer: NDArray[np.int64] = changed_slots(base, target).sum(axis=1)
    return per_layer


def with_shares_of(
    placement: Placement, slots: Topology, held: NDArray[np.int32], topology: Topology
) -> Placement:
    """``held`` [L, S] with the shares and the generation of ``placement``, expert by expert.

    Args:
        placement: its ranks hold the same experts, each at most once.
        slots: where its slots are.
        held: experts by slot.
        topology: where these slots are.
    """
    old = placement.slot_to_expert
    place = np.full((len(old), slots.num_ranks, placement.num_experts), EMPTY)
    layer, slot = np.nonzero(old != EMPTY)
    place[layer, slots.rank_of_slot[slot], old[layer, slot]] = slot
    layer, slot = np.nonzero(held != EMPTY)
    from_slot = place[layer, topology.rank_of_slot[slot], held[layer, slot]]

    def carried(share: NDArray[np.float64]) -> NDArray[np.float64]:
        there = np.zeros(held.shape)
        there[layer, slot] = share[layer, from_slot]
        return there

    source = placement.source_share
    return Placement(
        held,
        placement.num_experts,
        placement.generation,
        carried(placement.slot_share),
        None if source is None else np.array([carried(share) for share in source]),
    )


def holders(placement: Placement, topology: Topology) -> NDArray[np.bool_]:
    """[L, R, E] whether a rank holds an expert."""
    shape = (placement.num_layers, topology.num_ranks, placement.num_experts)
    holds = np.zeros(shape, dtype=np.bool_)
    layer, slot = np.nonzero(placement.slot_to_expert != EMPTY)
    holds[layer, topology.rank_of_slot[slot], placement.slot_to_expert[layer, slot]] = True
    return holds


def slots_in_use(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[L, R] slots of each rank that hold an expert."""
    used = np.zeros((placement.num_layers, topology.num_ranks), dtype=np.int64)
    layers, slots = np.nonzero(placement.slot_to_expert != EMPTY)
    np.add.at(used, (layers, topology.rank_of_slot[slots]), 1)
    return used


def sole_experts(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[R] experts of all layers that no other rank holds: what the loss of a rank costs."""
    is_sole = (placement.replica_count == 1)[:, None]  # [L, 1, E]; a rank holds an expert once
    of_rank: NDArray[np.int64] = (holders(placement, topology) & is_sole).sum(axis=(0, 2))
    return of_rank


def uncovered_experts(
    placement: Placement, topology: Topology, is_left: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """(layer, expert) of those that none of the ranks ``is_left`` [R] holds, in order."""
    is_held = holders(placement, topology)[:, is_left].any(axis=1)
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(~is_held)]


def undrained(placement: Placement, topology: Topology) -> tuple[int, ...]:
    """Ranks that are to hold nothing, and do."""
    held = slots_in_use(placement, topology).any(axis=0)
    return tuple(np.flatnonzero(held & topology.drained).tolist())
