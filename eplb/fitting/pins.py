"""Which pins of an operator a plan can meet, and why not the others.

A pin names an expert and the ranks that must hold it. One that cannot be met, because its rank is
gone for example, must not end all planning: it is left out, with a sentence.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import Which
from eplb.core.topology import Topology
from eplb.packing.zones import keeps_groups

Pins = Mapping[Which, Collection[int]]


@dataclass(frozen=True, eq=False)
class FittingPins:
    """Pins that can be met together, and a sentence for each that cannot."""

    pinned: Mapping[Which, tuple[int, ...]]  # ranks, by (layer, expert)
    left: NDArray[np.int64]  # [L, R] slots that may be used, less those of the pins
    unmet: tuple[str, ...] = ()


def fitting_pins(
    pins: Pins,
    room: NDArray[np.int64],
    topology: Topology,
    num_experts: int,
    num_groups: int = 1,
    kept: Mapping[tuple[int, int], tuple[int, ...]] = MappingProxyType({}),
) -> FittingPins:
    """Take pins one by one, by expert, layer and rank, as far as they fit.

    Args:
        pins: ranks that must hold an expert, of a layer or of every layer.
        room: [L, R] slots that may be used.
        topology: which ranks there are.
        num_experts: E.
        num_groups: the model's expert groups.
        kept: ranks that keep an expert, by (layer, expert): these are taken first.
    """
    pinned, unmet = dict[Which, tuple[int, ...]](), list[str]()
    num_layers, left = len(room), room.copy()
    free = room.sum(axis=1) - num_experts  # beyond one for each expert
    for (layer, expert), those in kept.items():
        pinned[layer, expert] = those
        free[layer] -= len(those) - 1
        left[layer, list(those)] -= 1
    if pins and keeps_groups(topology, num_groups, num_experts, room):
        why = (
            f"all pins: {num_groups} expert groups stay each on one of {topology.num_nodes} nodes, "
            "and the planner chooses the node of a group by load alone; expected no such groups"
        )
        return FittingPins(pinned, left, (why,))
    for which, ranks in pins.items():
        layers, expert = (
            (range(num_layers), which) if isinstance(which, int) else ([which[0]], which[1])
        )
        for layer in layers:
            if not (layer < num_layers and expert < num_experts):
                unmet.append(
                    f"layer {layer} expert {expert}: expected layers 0..{num_layers - 1} and "
                    f"experts 0..{num_experts - 1}"
                )
                continue
            held = pinned.get((layer, expert), ())
            for rank in sorted(set(ranks) - set(held)):
                why = _why_not(layer, rank, left, topology)
                if not why and held and free[layer] < 1:
                    why = "every slot that may be used is needed by an expert without another"
                if why:
                    unmet.append(f"layer {layer} expert {expert} on rank {rank}: {why}")
                    continue
                free[layer] -= bool(held)  # the first replica is the one that it needs anyhow
                left[layer, rank] -= 1
                held = pinned[layer, expert] = (*held, rank)
    return FittingPins(pinned, left, tuple(unmet))


def _why_not(layer: int, rank: int, left: NDArray[np.int64], topology: Topology) -> str:
    if rank >= topology.num_ranks:
        return f"expected ranks 0..{topology.num_ranks - 1}"
    if not topology.alive[rank]:
        return "the rank is not alive"
    if topology.drained[rank]:
        return "the rank is drained"
    if left[layer, rank] < 1:
        return "pins or a cordon take every slot there that may be used"
    return ""
