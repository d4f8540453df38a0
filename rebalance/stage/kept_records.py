"""Records of an engine as staging sees them: the host's memory, other hosts, disks, and digests.

An engine moves experts between its own ranks. What its ranks have lost, or send wrong or late, is
staged as in a rank of ours: the sources have the same order, and each record is checked before it
is used. The engine copies it to the slot itself.

Shapes:  L MoE layers, E experts.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from eplb.core.placement import EMPTY
from eplb.core.topology import Topology
from eplb.migration.build import Move, Source
from rebalance.stage.lanes import Pull
from rebalance.stage.mover import no_ranks
from rebalance.stage.source_choice import SourceChoice
from rebalance.stage.stage_settings import StageSettings
from rebalance.stage.stager import Stager
from rebalance.threads.waiting import WAIT_S
from rebalance.types import Record, always
from rebalance.weights.sources import HostMemory, WeightSources
from runtime.memory import SharedArena


class KeptRecords:
    """Brings records into this process, one at a time; used by one thread at a time.

    Args:
        host: the memory of this host, which fills itself from other hosts and from disk.
        digests: [L, E, 2] of every expert.
        record_bytes: of an expert, in whole pages.
    """

    def __init__(self, host: HostMemory, digests: torch.Tensor, record_bytes: int) -> None:
        self.digests, self._host = digests, host
        sources = WeightSources(None, host)
        alone = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=1)
        choice = SourceChoice(0, alone, sources.readable, no_ranks)
        self._stager = Stager(sources, choice, digests, StageSettings(), time.monotonic)
        # No rank's slots are a source here: each layer's map is empty.
        self._no_slots = np.full((len(digests), 1), EMPTY, dtype=np.int32)
        self._into = SharedArena("eplb-record", record_bytes).bytes

    def bring(self, record: Record) -> torch.Tensor:
        """Return the bytes [record_bytes] of a record; they are valid until the next call.

        Raises:
            MigrationError: neither this host, nor another one, nor a disk has right bytes.
        """
        move = Move(*record, dst_slot=0, source=Source.HOST)
        try:
            self._stager.preload([(move, self._no_slots)], always)
            for wait in self._stager.stage([Pull(move, self._into, self._no_slots)], always):
                threading.Event().wait(max(0.0, min(WAIT_S, wait.until - time.monotonic())))
        finally:
            for _ in self._stager.drain():
                pass
            self._host.release([record])
        return self._into

    @property
    def bytes_by_source(self) -> dict[str, int]:
        """Bytes so far: "host" taken from this host, for it "other_host" and "disk"."""
        return dict(self._stager.figures.bytes_by_source)
