"""The shared expert's tokens fill light ranks to the optimum of the linear program, home first."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog

from runtime.batch.shared_rule import LEAST, SharedSplit, split_shared

Floats = NDArray[np.float64]


def load_after(
    load: Floats, tokens: NDArray[np.int64], split: SharedSplit, weight: float
) -> Floats:
    """[R] load once every token of every source has its rank."""
    on_rank = np.zeros(len(load), np.int64)
    for source, count in enumerate(tokens):
        np.add.at(on_rank, split.targets(source, np.arange(count), int(count)), 1)
    assert on_rank.sum() == tokens.sum()
    assert on_rank.tolist() == (split.kept + split.taken).tolist()
    return load + weight * on_rank


def optimum(
    load: Floats, tokens: NDArray[np.int64], takes: NDArray[np.bool_], weight: float
) -> float:
    """Least load of the busiest rank that takes: variables are shared tokens [R] and that load."""
    num_ranks = len(load)
    bound = np.hstack([weight * np.eye(num_ranks), -np.ones((num_ranks, 1))])[takes]
    total = np.append(takes.astype(float), 0.0)[None]
    cost = np.append(np.zeros(num_ranks), 1.0)
    found = linprog(cost, bound, -load[takes], total, [tokens[takes].sum()], method="highs")
    return float(found.fun)


@pytest.mark.parametrize("weight", [1.0, 0.37, 2.0])
@pytest.mark.parametrize("num_ranks", [1, 2, 7, 32, 144])
def test_busiest_rank_is_at_the_optimum_of_the_linear_program(
    num_ranks: int, weight: float
) -> None:
    rng = np.random.default_rng(num_ranks)
    for skew in (0.1, 0.5, 3.0):
        load = rng.gamma(1 / skew, 1000 * skew, num_ranks)
        tokens = rng.integers(0, 400, num_ranks) * (rng.random(num_ranks) > 0.2)
        takes = rng.random(num_ranks) > 0.1
        takes[0] = True
        load[~takes] = 0
        # The weight itself is rounded to a 64th; loads and tokens to one.
        exact = round(weight * 64) / 64

        split = split_shared(load, tokens, takes, weight=weight, least=1)

        after = load_after(load, tokens, split, exact)
        assert after[takes].max() <= optimum(load, tokens, takes, exact) + 2 * max(1.0, exact)
        assert split.taken[~takes].sum() == 0
        assert split.kept[~takes].tolist() == tokens[~takes].tolist()


def test_rank_gives_only_what_is_above_the_level() -> None:
    load = np.array([1000.0, 400.0, 700.0, 300.0])
    tokens = np.array([200, 200, 200, 200])

    split = split_shared(load, tokens, np.ones(4, bool))

    # 1,200 at home, against a mean of 800 and 1,000 routed tokens, which cannot move.
    assert split.kept.tolist() == [0, 200, 200, 200]
    assert split.taken.tolist() == [0, 50, 0, 150]  # 500 and 600 at home: to one level of 650


def test_fewer_tokens_than_the_least_stay_at_home() -> None:
    tokens = np.full(2, 100)
    above = np.array([2.0 * LEAST - 2, 0.0])

    assert split_shared(above, tokens, np.ones(2, bool)).kept.tolist() == [100, 100]
    above[0] += 4
    assert split_shared(above, tokens, np.ones(2, bool)).kept.tolist() == [100 - LEAST - 1, 100]


def test_tokens_beyond_those_that_were_counted_stay_at_home() -> None:
    split = split_shared(np.array([900.0, 0.0]), np.array([100, 0]), np.ones(2, bool))

    assert split.targets(0, np.array([0, 99, 100, 250]), 100).tolist() == [1, 1, 0, 0]
    assert split.targets(1, np.array([0, 7]), 0).tolist() == [1, 1]


def test_batch_without_tokens_and_group_without_serving_ranks_move_nothing() -> None:
    nothing = np.zeros(3, np.int64)

    assert split_shared(np.zeros(3), nothing, np.ones(3, bool)).up_to.tolist() == [0, 0, 0]
    assert split_shared(np.zeros(3), nothing + 5, np.zeros(3, bool)).kept.tolist() == [5, 5, 5]
