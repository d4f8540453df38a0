from __future__ import annotations

import numpy as np
import pytest

from eplb import Topology
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.decision import expectation
from eplb.policies.table import contiguous_policy


def test_gain_on_requests_that_span_windows_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer another expert is hot every four windows: no plan on the past gains later."""
    hot = np.random.default_rng(0).integers(8, size=(5, 4))
    load = np.full((16, 4, 8), 1000)
    for window in range(16):
        load[window, range(4), hot[(window + 2) // 4]] += 3000
    history, ranks = LoadHistory(load), Topology.uniform(1, 4, 3)
    problem = Problem(history, ranks, current=contiguous_policy(Problem(history, ranks)))
    promised, changed = np.full(4, 0.5), np.ones(4, dtype=np.bool_)

    apart = expectation.expected_part(problem, promised, changed)
    monkeypatch.setattr(expectation, "GAP", 0)
    beside = expectation.expected_part(problem, promised, changed)

    assert apart.is_judged
    assert apart.part < beside.part / 2
