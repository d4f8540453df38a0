"""Serving time that a change of placement takes: by its bytes on each link, waited for or not.

Synchronous: serving stops until the rank that receives longest is done. Asynchronous: serving goes
on, and steps are longer by a small part while bytes move at a throttled rate.

Shapes:  R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb.core.model import ModelShape
from eplb.errors import ConfigError
from simulations.cost.hardware import Hardware
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

    def transfer_s(self, moved: Moved, most_bytes_s: float = float("inf")) -> float:
        """Seconds until the rank that receives longest has everything."""
        hardware, size = self.hardware, self.model.expert_bytes
        rates = (LOCAL_BYTES_S, hardware.node_bytes_s, hardware.network_bytes_s)
        seconds = sum(
            received * size / min(rate, most_bytes_s)
            for received, rate in zip(moved.received, rates, strict=True)
        )
        return float(seconds.max())

    def lost_s(self, moved: Moved, *, is_async: bool) -> float:
        """Serving time that is lost."""
        if not moved.total:
            return 0.0
        if is_async:
            return self.stretch * self.transfer_s(moved, THROTTLED_BYTES_S)
        return self.host_s + self.transfer_s(moved)
