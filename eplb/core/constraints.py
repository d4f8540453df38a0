"""Constraints of a plan, which are met whatever they cost in balance.

Always: every expert has a slot, no rank holds an expert twice, a dead rank holds nothing.
``Constraints`` adds further ones. Contradictions raise ConfigError before planning starts.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.topology import Topology
from eplb.errors import ConfigError

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
    keep_groups: bool | None = None  # each on one node; None: when they divide by nodes and fit
    joining: frozenset[int] = frozenset()  # ranks that are not ready
    slots: ArrayLike | None = None  # [L, R] slots that may be used; default: all

    def __post_init__(self) -> None:
        object.__setattr__(self, "joining", frozenset(self.joining))
        if self.hottest_in_two_domains < 0:
            raise ConfigError(
                f"constraints: hottest_in_two_domains is {self.hottest_in_two_domains}, "
                "expected 0 or more"
            )
        for which, domains in self.min_domains.items():
            if domains < 1:
                raise ConfigError(
                    f"constraints: min_domains of {which} is {domains}, expected 1 or more"
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
