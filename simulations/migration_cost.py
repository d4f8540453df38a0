"""Serving time that a change of placement takes: by its bytes on each link, waited for or not.

Synchronous: serving stops until the rank that sends or receives longest is done. Asynchronous:
serving goes on, and steps are longer by a small part while bytes move at a throttled rate. Moves
and the step's own rows share the network ports: the step's part there takes longer meanwhile.

An engine copies an expert from its own rank, else from a rank of the same node, else over the
network. Ranks that could send a weight send equal parts of it here, so that plans that move nearly
everything are cheap to price; ``eplb.migration`` makes the moves themselves.

Shapes:  L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement, changed_slots
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.step_time import Hardware, by_port

LOCAL_BYTES_S = 2.1e12  # a copy inside of one GPU, measured on H200
# Of a layer step while a peer sends 19 GB/s in chunks: 0.2 % at the median, 0.3 % at p99; at
# 188 GB/s 2.7 % and 52 % (4 H200 of one host, 2026-11-20).
THROTTLED_BYTES_S, STRETCH = 20e9, 0.003


@dataclass(frozen=True)
class MigrationCost:
    """How bytes move.

    Raises:
        ConfigError: a figure below 0.
    """

    model: ModelShape
    hardware: Hardware
    host_s: float = 0.1  # work of hosts and votes for each change that is waited for
    stretch: float = STRETCH

    def __post_init__(self) -> None:
        if not (self.host_s >= 0 and self.stretch >= 0):
            raise ConfigError(
                f"host_s is {self.host_s} and stretch {self.stretch}, expected 0 or more"
            )

    def transfer_s(
        self, moved: Moved, topology: Topology, most_bytes_s: float = float("inf")
    ) -> tuple[float, float]:
        """Seconds until the rank whose links take longest has everything, and of its network."""
        hardware, size = self.hardware, self.model.expert_bytes
        rates = (LOCAL_BYTES_S, hardware.node_bytes_s, hardware.network_bytes_s)
        # Links carry both directions at once; what ranks send through one port shares it.
        weights = np.maximum(moved.received, moved.sent)
        network = (
            by_port(one[2], topology, hardware.port_ranks) for one in (moved.received, moved.sent)
        )
        weights[2] = np.maximum(*network)
        seconds = np.array(
            [one * size / min(rate, most_bytes_s) for one, rate in zip(weights, rates, strict=True)]
        )
        longest = int(seconds.sum(axis=0).argmax())
        return float(seconds[:, longest].sum()), float(seconds[2, longest])

    def lost_s(
        self, moved: Moved, topology: Topology, *, is_async: bool, network_part: float = 0.0
    ) -> float:
        """Serving time that is lost.

        Args:
            network_part: of a step, in which its own rows pass through the network ports.
        """
        if not moved.total:
            return 0.0
        if not is_async:
            return self.host_s + self.transfer_s(moved, topology)[0]
        port = self.hardware.network_bytes_s
        # Moves take what serving leaves of a port, and half of it at least; serving has the rest.
        rate = min(THROTTLED_BYTES_S, port * max(1 - network_part, 0.5))
        whole_s, network_s = self.transfer_s(moved, topology, rate)
        slower = network_part * rate / (port - rate) if network_part else 0.0
        return self.stretch * whole_s + slower * network_s


LINKS = ("same_rank", "node", "network")


@dataclass(frozen=True, eq=False)
class Moved:
    """Weights that a change of placement copies into slots."""

    by_link: dict[str, int]  # weights, by LINKS
    received: NDArray[np.int64]  # [len(LINKS), R] weights that each rank receives
    sent: NDArray[np.float64]  # [len(LINKS), R] that each rank sends, by equal parts of its holders
    layers: int  # layers in which anything moves

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_link.values())


def moved_between(base: Placement, target: Placement, topology: Topology) -> Moved:
    """Count the weights of ``target`` that are not in their slots under ``base``."""
    layers, slots = np.nonzero(changed_slots(base, target))
    ranks, nodes = topology.rank_of_slot[slots], topology.node_of_slot[slots]
    experts = target.slot_to_expert[layers, slots]
    on_rank = _held(base, topology.rank_of_slot, topology.num_ranks)
    on_node = _held(base, topology.node_of_slot, topology.num_nodes)
    is_here = on_rank[layers, ranks, experts]
    is_near = ~is_here & on_node[layers, nodes, experts]
    received = np.array(
        [
            np.bincount(ranks[chosen], minlength=topology.num_ranks)
            for chosen in (is_here, is_near, ~is_here & ~is_near)
        ]
    )
    by_link = dict(zip(LINKS, received.sum(axis=1).tolist(), strict=True))
    holders = on_rank[layers, :, experts]  # [moved, R]
    of_node = topology.node_of_rank[None, :] == nodes[:, None]
    sent = np.zeros((len(LINKS), topology.num_ranks))
    for link, senders in (
        (1, holders[is_near] & of_node[is_near]),
        (2, holders[~is_here & ~is_near]),
    ):
        parts = np.maximum(senders.sum(axis=1, keepdims=True), 1)  # without a holder: from a host
        sent[link] = (senders / parts).sum(axis=0)
    return Moved(by_link, received, sent, len(np.unique(layers)))


def _held(
    placement: Placement, place_of_slot: NDArray[np.int32], num_places: int
) -> NDArray[np.bool_]:
    """[L, places, E] whether a rank, or a node, holds an expert."""
    held = np.zeros((placement.num_layers, num_places, placement.num_experts), dtype=np.bool_)
    layers, slots = np.nonzero(placement.slot_to_expert != EMPTY)
    held[layers, place_of_slot[slots], placement.slot_to_expert[layers, slots]] = True
    return held
