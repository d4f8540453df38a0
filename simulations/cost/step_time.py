"""Time of a forward pass from the tokens of its slots: dispatch, experts, combine, layer by layer.

Ranks wait for each other at dispatch and at combine, so a layer takes

    max over ranks of dispatch + max of experts + max of combine

and the shared expert and what is outside of the MoE layer on top, which balance does not change.
With two-batch overlap a layer takes the longer of communication and computation.

Tokens start evenly on all live ranks, or on attention ranks of other nodes. In decode (DeepEP's
low-latency mode) each copy of a token crosses its links alone. In prefill (normal mode) a token
crosses the network once for each node that it goes to, and reaches a rank once.

Shapes:  L MoE layers, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.cost.expert_time import ExpertTime
from simulations.cost.hardware import Hardware, by_port


@dataclass(frozen=True)
class Transport:
    """What dispatch and combine take beside the rates of links: FP8 with scales, and BF16 back."""

    dispatch_us: float = 0.0  # of few tokens
    combine_us: float = 0.0
    dispatch_rate: float = 1.0  # part of the rate of the link that takes longer
    combine_rate: float = 1.0
    dispatch_bytes: float = 1 + 4 / 128  # of each of a row's columns
    combine_bytes: float = 2.0


# DeepEP by the nodes of a group, of even load (benchmarks/fidelity/links.py).
LOW_LATENCY = {
    1: Transport(14.9, 11.3, 1.06, 0.88),
    2: Transport(19.6, 24.8, 1.02, 1.01),
    4: Transport(25.3, 25.3, 1.04, 0.99),
    8: Transport(27.2, 25.8, 1.04, 1.01),
}
NORMAL = {
    1: Transport(34.5, 51.8, 1.23, 1.26),
    2: Transport(60.9, 93.2, 0.87, 0.69),
    4: Transport(92.9, 121.9, 0.99, 0.96),
    8: Transport(121.1, 134.4, 0.49, 0.47),
}


def deepep(nodes: int, *, is_prefill: bool) -> Transport:
    """DeepEP between the ranks of so many nodes: what was measured on the nearest number."""
    known = NORMAL if is_prefill else LOW_LATENCY
    return known[min(known, key=lambda one: abs(np.log(one / nodes)))]


@dataclass(frozen=True)
class StepModel:
    """What decides the time of a step beside its tokens.

    Raises:
        ConfigError: times below 0.
    """

    model: ModelShape
    topology: Topology
    hardware: Hardware
    experts: ExpertTime
    is_prefill: bool = False
    other_us: float = 0.0  # of a layer outside its MoE part: attention, norms, router
    is_overlapped: bool = False  # two batches in turns
    is_separate: bool = False  # tokens start on attention ranks, and all cross the network
    transport: Transport | None = None  # None: DeepEP, by mode and nodes

    def __post_init__(self) -> None:
        if not self.other_us >= 0:
            raise ConfigError(f"other_us is {self.other_us}, expected 0 or more")
        if not (self.model.hidden and self.model.intermediate):
            raise ConfigError("the model has no sizes of experts, expected hidden and intermediate")

    def of(self, rows: NDArray[np.float64]) -> StepTime:
        """Times of one step with rows [L, S] in its slots."""
        topology, serving = self.topology, self.topology.serving
        by_rank = rows @ np.eye(topology.num_ranks)[topology.rank_of_slot]
        of_ranks = self.experts.of_ranks(rows, topology)[:, serving]
        return self._step(by_rank, (of_ranks / topology.rank_speed[serving]).max(axis=1))

    def bound(self, rows: NDArray[np.float64]) -> StepTime:
        """Times below those of any placement, for rows [L, E] of experts: no expert is read twice.

        Ranks share the work of experts by their speed, and rows cross links evenly.
        """
        serving = self.topology.serving
        by_rank = rows.sum(axis=1, keepdims=True) * (serving / serving.sum())
        slots_us = self.experts.at(float(rows.mean())).of_slots(rows).sum(axis=1)
        speed = float(self.topology.rank_speed[serving].sum())
        return self._step(by_rank, self.experts.of_sum(slots_us / speed))

    def _step(self, by_rank: NDArray[np.float64], experts: NDArray[np.float64]) -> StepTime:
        """Times of a step with rows [L, R] of ranks, and the longest experts [L]."""
        topology, serving = self.topology, self.topology.serving
        speed = topology.rank_speed[serving]
        near, far = self._copies(by_rank)
        busy = by_rank.sum(axis=1) > 0
        far = by_port(far, topology, self.hardware.port_ranks)
        by = self.transport or deepep(topology.num_nodes, is_prefill=self.is_prefill)
        dispatch = self._link_us(near, far, by.dispatch_bytes) / by.dispatch_rate
        combine = self._link_us(near, far, by.combine_bytes) / by.combine_rate
        dispatch, combine = dispatch + by.dispatch_us * busy, combine + by.combine_us * busy
        tokens = by_rank.sum(axis=1) / self.model.top_k / max(int(serving.sum()), 1)
        shared = self.model.num_shared_experts * self.experts.of_slots(tokens) / speed.min()
        network = self._network_us(far, by)
        return StepTime(
            dispatch, experts, combine, shared, self.other_us, self.is_overlapped, network
        )

    def _copies(
        self, by_rank: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[L, R] rows that reach each rank from its node, and from others."""
        topology, num_nodes = self.topology, self.topology.num_nodes
        ranks_of_node = np.bincount(topology.node_of_rank[topology.serving], minlength=num_nodes)
        here = (ranks_of_node / ranks_of_node.sum())[topology.node_of_rank]  # of the tokens
        here = np.zeros_like(here) if self.is_separate else here
        if not self.is_prefill:
            return by_rank * here, by_rank * (1 - here)
        total = by_rank.sum(axis=1, keepdims=True)
        of_node = by_rank @ np.eye(num_nodes)[topology.node_of_rank]
        part = np.divide(of_node, total, out=np.zeros_like(of_node), where=total > 0)
        reached = total / self.model.top_k * (1 - (1 - part) ** self.model.top_k)  # [L, N] tokens
        each = reached / np.maximum(ranks_of_node, 1)
        part = np.divide(by_rank, total, out=np.zeros_like(by_rank), where=total > 0)
        once = total / self.model.top_k * (1 - (1 - part) ** self.model.top_k)  # [L, R] tokens
        return once, each[:, topology.node_of_rank] * (1 - here)

    def _link_us(
        self, near: NDArray[np.float64], far: NDArray[np.float64], width: float
    ) -> NDArray[np.float64]:
        """[L] microseconds of the rank whose links take longest."""
        scale = self.model.hidden * width * 1e6
        times = np.maximum(
            near * scale / self.hardware.node_bytes_s, far * scale / self.hardware.network_bytes_s
        )
        slowest: NDArray[np.float64] = times.max(axis=1)
        return slowest

    def _network_us(self, far: NDArray[np.float64], by: Transport) -> NDArray[np.float64]:
        """[L] microseconds in which rows pass through the busiest port, both ways together."""
        width = by.dispatch_bytes + by.combine_bytes
        longest: NDArray[np.float64] = far.max(axis=1) * (
            self.model.hidden * width * 1e6 / self.hardware.network_bytes_s
        )
        return longest


@dataclass(frozen=True, eq=False)
class StepTime:
    """Microseconds of each layer's parts, of the rank that the others wait for."""

    dispatch: NDArray[np.float64]  # [L]
    experts: NDArray[np.float64]  # [L]
    combine: NDArray[np.float64]  # [L]
    shared: NDArray[np.float64]  # [L]
    other_us: float
    is_overlapped: bool
    network: NDArray[np.float64]  # [L] of dispatch and combine, in which network ports are busy

    @property
    def parts_us(self) -> tuple[float, float, float, float]:
        """Of the step: dispatch, experts, combine, and the rest."""
        rest = float(self.shared.sum()) + self.other_us * len(self.experts)
        links = float(self.dispatch.sum()), float(self.combine.sum())
        return links[0], float(self.experts.sum()), links[1], rest

    @property
    def network_part(self) -> float:
        """Of the step, in which its rows pass through the busiest network port."""
        return min(1.0, float(self.network.sum()) / self.us) if self.us else 0.0

    @property
    def layers_us(self) -> NDArray[np.float64]:
        """[L] of each layer."""
        links, products = self.dispatch + self.combine, self.experts + self.shared + self.other_us
        if self.is_overlapped:
            overlapped: NDArray[np.float64] = np.maximum(links, products)
            return overlapped
        summed: NDArray[np.float64] = links + products
        return summed

    @property
    def us(self) -> float:
        """Of the step."""
        return float(self.layers_us.sum())
