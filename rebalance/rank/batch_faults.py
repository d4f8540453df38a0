"""Faults that the device counts while it serves, read on the host once they have arrived."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from eplb.errors import RankError
from eplb.shares.switches import DIFFERENT_PULLS, LATE_COUNTS
from runtime.counters import Cut

log = logging.getLogger(__name__)

NONE = np.zeros(1, dtype=np.int64)


class BatchFaults:
    """Copies the counters with each sample, and never waits for them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._watched: Mapping[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}  # since the start, by kind, as they arrived last

    def watch(self, counters: Mapping[str, torch.Tensor]) -> None:
        """Read these from now on: [1] int32 each, on the device, never reset."""
        self._watched = dict(counters)
        self.counts = dict.fromkeys(counters, 0)

    def cut(self) -> dict[str, Cut]:
        """Copy the counters as they stand at this point of the compute stream."""
        return {kind: Cut(one, NONE) for kind, one in self._watched.items()}

    def read(self, arrived: Mapping[str, Cut]) -> None:
        """Take the copies of a cut, once they have arrived.

        Raises:
            RankError: ranks decided different pulls: outputs since are wrong.
        """
        before = self.counts.get(LATE_COUNTS, 0)
        self.counts.update((kind, int(cut.counts()[0])) for kind, cut in arrived.items())
        late = self.counts.get(LATE_COUNTS, 0)
        if late and not before:  # every batch after it is late too, and counted
            log.warning(
                "rank %d: %d exchanges of counts were not complete in time, expected 0: a rank is "
                "dead or did not call its layers in order; batches are split by own counts since",
                self._rank,
                late,
            )
        if different := self.counts.get(DIFFERENT_PULLS, 0):
            raise RankError(
                f"rank {self._rank}: {different} decisions on pulls differed between ranks, "
                "expected none: their counts, tables or pull rules differ, and outputs since are "
                "wrong"
            )
