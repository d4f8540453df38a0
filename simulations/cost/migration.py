"""Serving time that a change of placement takes: by its bytes on each link, waited for or not.

Synchronous: serving stops until the rank that sends or receives longest is done. Asynchronous:
serving goes on, and steps are longer by a small part while bytes move at a throttled rate. Moves
and the step's own rows share the network ports: the step's part there takes longer meanwhile.

Shapes:  R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.cost.hardware import Hardware, by_port
from simulations.cost.moved import Moved

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
