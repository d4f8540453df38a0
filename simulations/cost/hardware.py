"""Figures of accelerators: data sheets, and the parts of them that kernels were measured to reach.

The parts were measured on H200 (benchmarks/reports, 2026-11-20): 2.9 TB/s of weights and 750
TFLOP/s of BF16 in a grouped GEMM, DeepEP's dispatch and combine at 261 and 359 GB/s of NVLink. For
the other cards they are assumed to be the same parts.

Shapes:  R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.topology import Topology
from eplb.errors import ConfigError

Rows = NDArray[np.float64]
READS, COMPUTES, LINKS = 0.6, 0.76, 0.6  # parts of the data sheet that are reached


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links, per direction, at the rates that are reached.

    Raises:
        ConfigError: a figure that is not above 0.
    """

    name: str
    memory_bytes: float
    reads: float  # bytes of weights a second
    fp8_flops: float
    bf16_flops: float
    node_bytes_s: float  # to another rank of the node
    network_bytes_s: float  # of one port, to ranks of other nodes
    port_ranks: int = 1  # neighbours of a node that share a port

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name" and not value > 0:
                raise ConfigError(f"hardware {self.name}: {name} is {value}, expected above 0")


def _card(
    name: str, gb: float, hbm_tb: float, fp8_tf: float, bf16_tf: float, nvlink_gb: float
) -> Hardware:
    return Hardware(
        name,
        gb * 1e9,
        hbm_tb * 1e12 * READS,
        fp8_tf * 1e12 * COMPUTES,
        bf16_tf * 1e12 * COMPUTES,
        nvlink_gb * 1e9 * LINKS,
        46e9,  # DeepEP over one 400 Gbit/s port, as its authors measured
    )


HARDWARE = {
    "h20": _card("h20", 96, 4.0, 296, 148, 450),
    "h100": _card("h100", 80, 3.35, 1979, 989, 450),
    "h200": _card("h200", 141, 4.8, 1979, 989, 450),
    "h800": _card("h800", 80, 3.35, 1979, 989, 200),
}


def by_port(of_ranks: NDArray[np.float64], topology: Topology, port_ranks: int) -> Rows:
    """[..., R] what passes through the port of each rank, for what each rank sends or receives."""
    if port_ranks == 1:
        return of_ranks
    node, ports = topology.node_of_rank, np.zeros(topology.num_ranks, dtype=np.int64)
    for first in np.unique(node):
        here = np.flatnonzero(node == first)
        ports[here] = here[0] + np.arange(len(here)) // port_ranks  # numbers of no other node
    together: Rows = of_ranks @ (ports[:, None] == ports[None, :]).astype(np.float64)
    return together


def hardware_named(name: str) -> Hardware:
    """Look a card up.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in HARDWARE:
        known = ", ".join(sorted(HARDWARE))
        raise ConfigError(f"unknown hardware {name!r}, expected one of: {known}")
    return HARDWARE[name]
