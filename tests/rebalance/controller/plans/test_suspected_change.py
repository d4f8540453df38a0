"""A change of load that weak proof shows, where the serving placement is far worse after it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from rebalance.controller.plans.planning import suspected_change

RNG = np.random.default_rng(3)
HOT_FIRST, HOT_LAST = [4, 2, 1, 1], [1, 1, 2, 4]
STEADY = [1.10, 1.12, 1.08, 1.11, 1.09, 1.10]  # imbalance of windows; 1.5 is far above them


def load(*profiles: tuple[list[int], int]) -> LoadHistory:
    """[T, 4, 4] windows of 4,000 tokens a layer of each profile, so many of each."""
    windows = [
        RNG.multinomial(4000, np.array(profile) / sum(profile), size=4)
        for profile, number in profiles
        for _ in range(number)
    ]
    return LoadHistory(np.array(windows))


def test_change_that_makes_the_serving_placement_far_worse_is_believed() -> None:
    seen = load((HOT_FIRST, 6), (HOT_LAST, 1))

    assert suspected_change(seen, np.array([*STEADY, 1.5])) == 1


@pytest.mark.parametrize(
    "balance",
    [
        np.array([*STEADY, 1.12]),
        np.array([1.10, 1.5]),
        np.array([*STEADY, np.inf]),
        np.zeros(0),
    ],
    ids=["no worse", "too few windows under the placement", "not finite", "no window"],
)
def test_change_without_a_far_worse_balance_is_not(balance: NDArray[np.float64]) -> None:
    assert suspected_change(load((HOT_FIRST, 6), (HOT_LAST, 1)), balance) == 0


def test_worse_balance_without_a_change_of_load_is_not_believed() -> None:
    assert suspected_change(load((HOT_FIRST, 7)), np.array([*STEADY, 1.5])) == 0
