"""Time of a forward pass from the tokens of its slots: dispatch, experts, combine, layer by layer.

Ranks wait for each other at dispatch and at combine, so a layer takes

    max over ranks of dispatch + max of experts + max of combine

and the shared expert and what is outside of the MoE layer on top, which balance does not change.
With two-batch overlap a layer takes the longer of communication and computation.

Tokens start evenly on all live ranks, or on attention ranks of other nodes. In decode (DeepEP's
low-latency mode) each copy of a token crosses its links alone. In prefill (normal mode) a token
crosses the network once for each node that it goes to, and is forwarded inside the node.

Shapes:  L MoE layers, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.cost.expert_time import ExpertTime, Hardware, by_port


@dataclass(frozen=True)
class Transport:
    """What dispatch and combine take beside the rates of links.

    The default is DeepEP's low-latency mode: FP8 with scales there, BF16 back, and the times of few
    tokens that were measured on 4 H200 of one host.
    """

    dispatch_bytes: float = 1 + 4 / 128  # of each of a row's columns
    combine_bytes: float = 2.0
    dispatch_us: float = 30.0
    combine_us: float = 50.0


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
    transport: Transport = Transport()

    def __post_init__(self) -> None:
        if not self.other_us >= 0:
            raise ConfigError(f"other_us is {self.other_us}, expected 0 or more")
        if not (self.model.hidden and self.model.intermediate):
            raise ConfigError("the model has no sizes of experts, expected hidden and intermediate")

    def of(self, rows: NDArray[np.float64]) -> StepTime:
        """Times of one step with rows [L, S] in its slots."""
        topology = self.topology
        speed, serving = topology.rank_speed[topology.serving], topology.serving
        by_rank = rows @ np.eye(topology.num_ranks)[topology.rank_of_slot]
        experts = (self.experts.of_ranks(rows, topology)[:, serving] / speed).max(axis=1)
        near, far = self._copies(by_rank)
        busy = by_rank.sum(axis=1) > 0
        by, far = self.transport, by_port(far, topology, self.hardware.port_ranks)
        dispatch = self._link_us(near, far, by.dispatch_bytes) + by.dispatch_us * busy
        combine = self._link_us(near, far, by.combine_bytes) + by.combine_us * busy
        tokens = by_rank.sum(axis=1) / self.model.top_k / max(int(serving.sum()), 1)
        shared = self.model.num_shared_experts * self.experts.of_slots(tokens) / speed.min()
        network = self._network_us(far)
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
        return by_rank, each[:, topology.node_of_rank] * (1 - here)

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

    def _network_us(self, far: NDArray[np.float64]) -> NDArray[np.float64]:
        """[L] microseconds in which rows pass through the busiest port, both ways together."""
        width = self.transport.dispatch_bytes + self.transport.combine_bytes
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
