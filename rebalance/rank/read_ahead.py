"""Has a host load candidate experts ahead of the plan that may need them.

The controller publishes candidates with each window; one rank of each host forwards its host's. The
host cache loads them when idle, and never evicts a leased record for them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from eplb.core.topology import Topology
from rebalance.rank.core import RankCore


class ReadAhead:
    """One rank's part in it; used by the watcher's thread alone."""

    def __init__(self, core: RankCore) -> None:
        self._core = core
        topology = core.settings.topology
        self._host = int(topology.host_of_rank[core.rank])
        self._passes_on = core.rank == first_rank_of(self._host, topology)
        self._last: tuple[tuple[int, int], ...] = ()

    def look(self) -> None:
        """Pass the host's candidates on, if they are others than before.

        Raises:
            StoreError: the store failed.
        """
        if not self._passes_on:
            return
        core = self._core
        wanted = core.links.store.candidates().of(self._host)
        if wanted != self._last:
            self._last = wanted
            core.watcher.do(partial(core.mover.read_ahead, wanted))


def first_rank_of(host: int, topology: Topology) -> int:
    """The lowest live rank of a host."""
    return int(np.flatnonzero((topology.host_of_rank == host) & topology.alive)[0])
