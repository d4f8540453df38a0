"""Figures of accelerators: memory, and rates of links that were measured to be reached.

NVLink: DeepEP's dispatch and combine on H200 reached 0.6 of the data sheet (benchmarks/reports,
2026-11-20), which is assumed of the other cards. Times of experts are in ``kernels``.

Shapes:  R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.topology import Topology
from eplb.errors import ConfigError

Rows = NDArray[np.float64]
LINKS = 0.6  # part of the data sheet that is reached


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links, per direction, at the rates that are reached.

    Raises:
        ConfigError: a figure that is not above 0.
    """

    name: str
    memory_bytes: float
    node_bytes_s: float  # to another rank of the node
    network_bytes_s: float  # of one port, to ranks of other nodes
    port_ranks: int = 1  # neighbours of a node that share a port

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name" and not value > 0:
                raise ConfigError(f"hardware {self.name}: {name} is {value}, expected above 0")


def _card(name: str, gb: float, nvlink_gb: float) -> Hardware:
    # DeepEP over one port of 400 Gbit/s, as its authors measured: 46 GB/s.
    return Hardware(name, gb * 1e9, nvlink_gb * 1e9 * LINKS, 46e9)


HARDWARE = {
    "h20": _card("h20", 96, 450),
    "h100": _card("h100", 80, 450),
    "h200": _card("h200", 141, 450),
    "h800": _card("h800", 80, 200),
    "b200": _card("b200", 180, 900),
    "gb200": _card("gb200", 186, 900),
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
