"""Rows that the scorecard of times rebuilds from what a table says of a measurement."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.fidelity.cases import Cases
from benchmarks.fidelity.draws import Spread, drawn, even
from benchmarks.fidelity.tables import Measured, Serving, package_data
from eplb.core.kernels import Kernel
from eplb.errors import ConfigError

DEEPGEMM = Serving("h100", "sglang", "deepgemm", "fp8-tensor")


def test_even_tokens_give_each_expert_of_a_rank_the_same_rows() -> None:
    counts, tokens = even(Spread(tokens=64, experts=16, top_k=4, ranks=4))

    assert counts.tolist() == [16] * 4
    assert tokens == 64


def test_busiest_rank_of_a_draw_has_more_than_its_share_and_no_expert_twice() -> None:
    spread = Spread(tokens=256, experts=32, top_k=4, ranks=4, alpha=1.2)

    for counts, tokens in drawn(spread, 4):
        assert len(counts) == 8
        assert counts.sum() >= 256 * 4 / 4
        assert counts.max() <= tokens <= 256


def test_more_slots_leave_the_busiest_rank_fewer_rows() -> None:
    plain = Spread(tokens=256, experts=32, top_k=4, ranks=4, alpha=1.2, is_by_expert=True)
    spread = Spread(256, 32, 4, 4, 1.2, slots=40, is_by_expert=True)

    most = [np.mean([one.sum() for one, _ in drawn(of, 6)]) for of in (plain, spread)]

    assert most[1] < most[0]
    assert all(len(one) == 10 for one, _ in drawn(spread, 6))


def test_predicted_time_of_a_measured_row_is_that_of_its_slots() -> None:
    # 2 slots of 8 rows: 1 us of reading, 8 rows of 0.125 us of products.
    row = Measured(DEEPGEMM, "sglang wide-EP", 100, 3333, Spread(16, 8, 4, 4), us=25.0)
    kernel = Kernel(*("h100", "sglang", "deepgemm", "fp8-tensor", False), 20.0, 1e12, 16e12, 0.0)

    us = Cases([row]).predicted_us(kernel)

    assert us == pytest.approx([20 + 2 * np.hypot(1, 8 * 0.125)], rel=1e-3)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is not None, reason="the tables are installed")
def test_scorecard_without_the_tables_names_the_version_that_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"not installed, expected 0\.12\.0"):
        package_data()
