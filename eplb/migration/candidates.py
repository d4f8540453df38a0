"""Experts that a future plan may bring to a host that holds none of their replicas.

A plan takes milliseconds; reading an expert from disk into host memory takes up to a second. So
each host preloads, before any decision, the hottest experts that it does not hold: those with the
most work per slot, which are replicated first. A wrong guess costs reads of an idle disk.

Shapes:  L MoE layers, E experts, H hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology

PER_HOST = 32  # experts: 1.4 GB of DeepSeek-V3's in FP8, under a second of an NVMe disk


@dataclass(frozen=True)
class Candidates:
    """Experts that each host may need next, the likeliest first."""

    by_host: tuple[tuple[tuple[int, int], ...], ...] = ()  # [H][n] of (layer, expert)

    def of(self, host: int) -> tuple[tuple[int, int], ...]:
        """Experts that one host may need."""
        return self.by_host[host] if host < len(self.by_host) else ()


def candidates_for(
    tokens: NDArray[np.int64], placement: Placement, topology: Topology, per_host: int = PER_HOST
) -> Candidates:
    """Name, for each host, the hottest experts that none of its live ranks holds.

    Args:
        tokens: [L, E] routed to each expert.
        placement: the serving one.
        topology: which host each rank is on, and which ranks are alive.
        per_host: experts of one host, at most.

    Returns:
        For each host the experts with more tokens a replica than the mean expert of their layer,
        hottest first. None where all ranks are on one host, because it holds every expert.
    """
    mean = np.maximum(tokens.mean(axis=1, keepdims=True), 1)
    heat = tokens / np.maximum(placement.replica_count, 1) / mean
    hosts = topology.host_of_rank
    by_host = []
    for host in range(int(hosts.max()) + 1):
        is_here = (hosts == host) & topology.alive
        held = placement.slot_to_expert[:, is_here[topology.rank_of_slot]]
        lacks = np.ones(tokens.shape, dtype=np.bool_)
        layer, slot = np.nonzero(held != EMPTY)
        lacks[layer, held[layer, slot]] = False
        wanted = np.where(lacks & (heat > 1), heat, 0.0).ravel()
        hottest = np.argsort(-wanted, kind="stable")[:per_host]
        hottest = hottest[wanted[hottest] > 0]
        layers, experts = np.divmod(hottest, tokens.shape[1])
        by_host.append(tuple(zip(layers.tolist(), experts.tolist(), strict=True)))
    return Candidates(tuple(by_host))
