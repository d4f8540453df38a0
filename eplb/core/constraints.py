"""Constraints of a plan, which are met whatever they cost in balance.

Always: every expert has a slot, no rank holds an expert twice, a dead rank holds nothing.
``Constraints`` adds further ones. Contradictions raise ConfigError before planning starts.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.arrays import whole
from eplb.core.jit import BoolArray, FloatArray, IntArray
from eplb.core.topology import Topology
from eplb.core.zones import Ranks, Zones
from eplb.errors import ConfigError, PlacementError

# An expert in every layer, or (layer, expert). Layers count from 0 over the MoE layers.
Which = int | tuple[int, int]
_Asked = TypeVar("_Asked")


@dataclass(frozen=True, eq=False)
class Constraints:
    """Constraints of a plan.

    A rank that joins has slots but no weights yet: it may hold replicas, never a sole copy.

    Raises:
        ConfigError: a number that no plan can meet.
    """

    min_domains: Mapping[Which, int] = field(default_factory=dict)  # fewest failure domains
    hottest_in_two_domains: int = 0  # number of hottest experts of each layer in two domains
    pinned: Mapping[Which, Collection[int]] = field(default_factory=dict)  # ranks that must hold it
    # Each on one node; None: when they divide by nodes and fit, and the load is not decode alone.
    keep_groups: bool | None = None
    joining: frozenset[int] = frozenset()  # ranks that are not ready
    slots: ArrayLike | None = None  # [L, R] slots that may be used; default: all

    def __post_init__(self) -> None:
        object.__setattr__(self, "joining", frozenset(self.joining))
        if whole("constraints: hottest_in_two_domains", self.hottest_in_two_domains) < 0:
            raise ConfigError(
                f"constraints: hottest_in_two_domains is {self.hottest_in_two_domains}, "
                "expected 0 or more"
            )
        for name, example in (("min_domains", "2"), ("pinned", "(0,)")):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(
                    f"constraints: {name} is {getattr(self, name)!r}, expected a value for each "
                    f"expert, for example {{0: {example}}} or {{(layer, 0): {example}}}"
                )
        for which, domains in self.min_domains.items():
            if whole(f"constraints: min_domains of {which}", domains) < 1:
                raise ConfigError(
                    f"constraints: min_domains of {which} is {domains}, expected 1 or more"
                )
        for which, ranks in self.pinned.items():
            if not isinstance(ranks, Collection):
                raise ConfigError(
                    f"constraints: {which} is pinned to {ranks!r}, expected ranks, such as (0, 2)"
                )

    def of_layers(self, layers: NDArray[np.intp]) -> Constraints:
        """The constraints of some layers, which then count from 0 in this order."""
        place = {int(layer): now for now, layer in enumerate(layers)}
        slots = self.slots if self.slots is None else np.asarray(self.slots)[layers]
        spread = _of_layers(self.min_domains, place)
        return replace(self, min_domains=spread, pinned=_of_layers(self.pinned, place), slots=slots)

    @property
    def binds_experts(self) -> bool:
        """Whether single experts or ranks are constrained, not only slots and groups."""
        return bool(self.pinned) or self.binds_ranks

    @property
    def binds_ranks(self) -> bool:
        """Whether equal ranks without pins may not exchange what they hold."""
        return bool(self.min_domains or self.hottest_in_two_domains or self.joining)


def _of_layers(asked: Mapping[Which, _Asked], place: dict[int, int]) -> dict[Which, _Asked]:
    found: dict[Which, _Asked] = {}
    for which, value in asked.items():
        if isinstance(which, int):
            found[which] = value
        elif which[0] in place:
            found[place[which[0]], which[1]] = value
    return found


def room_of(constraints: Constraints, topology: Topology, num_layers: int) -> NDArray[np.int64]:
    """[L, R] slots that a layer may use on each rank; none on dead or drained ranks.

    Raises:
        ConfigError: ``slots`` of another shape, or more than there are.
    """
    room = np.broadcast_to(topology.usable_slots, (num_layers, topology.num_ranks))
    if constraints.slots is None:
        # Always a C-ordered copy: kernels are compiled once, for writable arrays of that layout.
        return np.array(room, order="C")
    asked = np.asarray(constraints.slots)
    if asked.shape != room.shape or asked.dtype.kind not in "iu":
        raise ConfigError(
            f"constraints: slots has shape {asked.shape} and dtype {asked.dtype}, "
            f"expected integers {room.shape}, layers x ranks"
        )
    wrong = np.argwhere((asked < 0) | (asked > topology.slots_of_rank))
    if wrong.size:
        layer, rank = wrong[0]
        raise ConfigError(
            f"constraints: layer {layer} may use {asked[layer, rank]} slots of rank {rank}, "
            f"expected 0..{topology.slots_of_rank[rank]}"
        )
    return np.array(np.minimum(asked, room), dtype=np.int64, order="C")


def spread_of(constraints: Constraints, load: NDArray[np.float64]) -> NDArray[np.int64]:
    """[L, E] fewest failure domains of each expert, for load [L, E].

    Raises:
        ConfigError: no such layer or expert.
    """
    spread = np.ones(load.shape, dtype=np.int64)
    hottest = np.argsort(-load, axis=1, kind="stable")[:, : constraints.hottest_in_two_domains]
    np.put_along_axis(spread, hottest, 2, axis=1)
    for which, domains in constraints.min_domains.items():
        for layer, expert in named(which, load.shape, "min_domains"):
            spread[layer, expert] = domains
    return spread


def pins_of(
    constraints: Constraints, topology: Topology, shape: tuple[int, int]
) -> NDArray[np.bool_]:
    """[L, R, E] replicas that the pins require.

    Raises:
        ConfigError: no such layer or expert, or no such live rank.
    """
    pinned = np.zeros((shape[0], topology.num_ranks, shape[1]), dtype=np.bool_)
    for which, ranks in constraints.pinned.items():
        for rank in ranks:
            if not 0 <= rank < topology.num_ranks or not topology.alive[rank]:
                raise ConfigError(
                    f"constraints: {which} is pinned to rank {rank}, expected a live rank "
                    f"of 0..{topology.num_ranks - 1}"
                )
            for layer, expert in named(which, shape, "pinned"):
                pinned[layer, rank, expert] = True
    return pinned


def ready_ranks(constraints: Constraints, topology: Topology) -> NDArray[np.bool_]:
    """[R] ranks that are alive and have their weights.

    Raises:
        ConfigError: no such joining rank, or no rank that is ready.
    """
    ready = topology.alive.copy()
    for rank in sorted(constraints.joining):
        if not 0 <= rank < topology.num_ranks:
            raise ConfigError(
                f"constraints: rank {rank} is joining, expected 0..{topology.num_ranks - 1}"
            )
        ready[rank] = False
    if not ready.any():
        raise ConfigError("constraints: every live rank is joining, expected one that is ready")
    return ready


def named(which: Which, shape: tuple[int, ...], where: str) -> Iterator[tuple[int, int]]:
    """(layer, expert) pairs of a key.

    Raises:
        ConfigError: no such layer or expert.
    """
    num_layers, num_experts = shape
    layers, expert = (
        (range(num_layers), which) if isinstance(which, int) else ([which[0]], which[1])
    )
    for layer in layers:
        if not (0 <= layer < num_layers and 0 <= expert < num_experts):
            raise ConfigError(
                f"constraints: {where} names layer {layer} expert {expert}, expected layers "
                f"0..{num_layers - 1} and experts 0..{num_experts - 1}"
            )
        yield layer, expert


class ConstraintArrays(NamedTuple):
    """Constraints as arrays; of 0 layers where single experts are not constrained."""

    zone_of_expert: IntArray  # [L, E] ranks that an expert may be placed on
    spread: IntArray  # [L or 0, E] fewest failure domains of an expert
    pinned: BoolArray  # [L or 0, R, E] replicas that are required
    domain: IntArray  # [R]
    ready: BoolArray  # [R] only these may hold a sole copy


def constraint_arrays(
    constraints: Constraints,
    topology: Topology,
    load: FloatArray,
    zones: Zones,
    *,
    every: bool = False,
) -> ConstraintArrays:
    """Constraints of each layer, for load [L, E].

    Args:
        constraints: as asked for.
        topology: ranks, and their failure domains.
        load: by which the hottest experts are chosen.
        zones: with the slots that layers may use.
        every: arrays of all layers also where single experts are not constrained.

    Raises:
        ConfigError: constraints on unknown experts or ranks, or that contradict each other.
        PlacementError: fewer slots on ready ranks than experts.
    """
    domain = topology.failure_domain.astype(np.int64)
    ready = ready_ranks(constraints, topology)
    if not (every or constraints.binds_experts):
        none = np.zeros((0, 0), dtype=np.int64)
        no_pins = np.zeros((0, 0, 0), dtype=np.bool_)
        return ConstraintArrays(zones.of_expert, none, no_pins, domain, ready)
    spread, pinned = spread_of(constraints, load), pins_of(constraints, topology, load.shape)
    arrays = ConstraintArrays(zones.of_expert, spread, pinned, domain, ready)
    _check_contradictions(arrays, zones.ranks)
    return arrays


def least_replicas(zones: Zones, arrays: ConstraintArrays) -> IntArray:
    """[L, E] fewest replicas of each expert that meet the constraints.

    Raises:
        PlacementError: more replicas than slots.
    """
    if not len(arrays.spread):
        return np.ones(zones.of_expert.shape, dtype=np.int64)
    pins = arrays.pinned.sum(axis=1)
    on_ready = (arrays.pinned & arrays.ready[None, :, None]).sum(axis=1)
    least: IntArray = np.maximum(arrays.spread, pins + ((pins > 0) & (on_ready == 0)))
    short = np.flatnonzero(least.sum(axis=1) > zones.num_slots.sum(axis=1))
    if short.size:
        layer = int(short[0])
        raise PlacementError(
            f"layer {layer}: constraints ask for {least[layer].sum()} replicas, "
            f"expected at most {zones.num_slots[layer].sum()}, the slots that may be used"
        )
    return np.ascontiguousarray(least, dtype=np.int64)


def _check_contradictions(arrays: ConstraintArrays, ranks: Ranks) -> None:
    room, zone, zone_of_expert = ranks.room, ranks.zone, arrays.zone_of_expert
    num_experts = zone_of_expert.shape[1]
    over = np.argwhere(arrays.pinned.sum(axis=2) > room)
    if over.size:
        layer, rank = over[0]
        raise ConfigError(
            f"constraints: layer {layer} pins {arrays.pinned[layer, rank].sum()} experts to rank "
            f"{rank}, expected at most {room[layer, rank]}, the slots that may be used there"
        )
    ready_room = room[:, arrays.ready].sum(axis=1)
    for layer in np.flatnonzero(ready_room < num_experts)[:1]:
        raise PlacementError(
            f"layer {layer}: {ready_room[layer]} slots on ranks that are ready for "
            f"{num_experts} experts, expected one for each: a joining rank may hold no sole copy"
        )
    outside_zone = np.argwhere(arrays.pinned & (zone_of_expert[:, None] != zone[:, None]))
    if outside_zone.size:
        layer, rank, expert = outside_zone[0]
        raise ConfigError(
            f"constraints: layer {layer} pins expert {expert} to rank {rank}, but its expert "
            f"group is kept on node {zone_of_expert[layer, expert]}"
        )
    for number in range(int(zone.max()) + 1):
        usable = (zone == number) & (room > 0)  # [L, R]
        domains = np.array([len(set(arrays.domain[row].tolist())) for row in usable])
        wrong = np.argwhere((arrays.spread > domains[:, None]) & (zone_of_expert == number))
        if wrong.size:
            layer, expert = wrong[0]
            raise ConfigError(
                f"constraints: layer {layer} expert {expert} must be in "
                f"{arrays.spread[layer, expert]} failure domains, expected at most "
                f"{domains[layer]}, the domains with slots that it may use"
            )
