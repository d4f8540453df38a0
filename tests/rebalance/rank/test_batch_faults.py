"""Faults that parts of a batch count on a device, as the agent reads them with its samples."""

from __future__ import annotations

import logging

import pytest
import torch

from eplb.shares.switches import LATE_COUNTS
from rebalance.rank.sampling import BatchFaults


def test_late_counts_are_reported_as_they_stood_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late, faults = torch.zeros(1, dtype=torch.int32), BatchFaults(rank=3)
    faults.watch({LATE_COUNTS: late})
    before = faults.cut()
    late += 2
    after = faults.cut()

    with caplog.at_level(logging.WARNING):
        faults.read(before)
        assert faults.counts == {LATE_COUNTS: 0}
        faults.read(after)
        late += 8  # every batch after a late one counts
        faults.read(faults.cut())

    assert faults.counts == {LATE_COUNTS: 10}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("rank 3: 2 exchanges of counts were not complete in time")


def test_rank_without_such_parts_reports_none() -> None:
    faults = BatchFaults(rank=0)

    faults.read(faults.cut())

    assert faults.counts == {}
