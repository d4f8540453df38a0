"""Has a host load candidate experts ahead of the plan that may need them.

The controller publishes candidates with each window; one rank of each host forwards its host's. The
host cache loads them when idle, and never evicts a leased record for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from eplb.core.topology import Topology
from rebalance.types import Record
from telemetry.state.store import StateStore


class ReadAhead:
    """One rank's part in it; used by the watcher's thread alone.

    Args:
        rank: which.
        topology: says which rank of a host passes its candidates on.
        store: names the candidates.
        order: has the mover's thread pass records on to the host.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        store: StateStore,
        order: Callable[[Sequence[Record]], None],
    ) -> None:
        self._store, self._order = store, order
        self._host = int(topology.host_of_rank[rank])
        self._passes_on = rank == first_rank_of(self._host, topology)
        self._last: tuple[tuple[int, int], ...] = ()

    def look(self) -> None:
        """Pass the host's candidates on, if they are others than before.

        Raises:
            StoreError: the store failed.
        """
        if not self._passes_on:
            return
        wanted = self._store.candidates().of(self._host)
        if wanted != self._last:
            self._last = wanted
            self._order(wanted)


def first_rank_of(host: int, topology: Topology) -> int:
    """The lowest live rank of a host."""
    return int(np.flatnonzero((topology.host_of_rank == host) & topology.alive)[0])
