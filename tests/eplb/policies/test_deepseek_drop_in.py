"""The drop-in for DeepSeek's function: same shapes and meaning, and no replica twice on a GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb import rebalance_experts
from eplb.errors import ConfigError, HistoryError

SMALL = np.array([[60, 20, 20], [10, 10, 80]])


def gpu_loads(
    weight: NDArray[np.int64], held: NDArray[np.int64], count: NDArray[np.int64], num_gpus: int
) -> NDArray[np.float64]:
    each = weight / count
    per_slot: NDArray[np.float64] = np.take_along_axis(each, held, axis=1)
    return per_slot.reshape(len(weight), num_gpus, -1).sum(axis=2)


def test_maps_are_each_other_s_inverse() -> None:
    held, slots, count = rebalance_experts(SMALL, 6, 1, 1, 3)

    for layer, expert in np.ndindex(*SMALL.shape):
        mine = slots[layer, expert]
        assert (mine >= 0).sum() == count[layer, expert]
        assert (held[layer, mine[mine >= 0]] == expert).all()


def test_replica_counts_are_those_published_for_this_load() -> None:
    # vLLM pull request 37656 quotes this load with a busiest GPU of 232 for this algorithm.
    weight = np.array([[600, 560, 120, 120, 20, 10, 10, 10]])

    held, _, count = rebalance_experts(weight, 16, 1, 1, 8)

    assert count.tolist() == [[5, 5, 1, 1, 1, 1, 1, 1]]
    assert gpu_loads(weight, held, count, 8).max() <= 232


def test_plans_of_drifted_load_with_one_slot_a_rank_keep_most_experts() -> None:
    rng = np.random.default_rng(0)
    before = rng.lognormal(0, 1, (4, 64))

    pair = [
        rebalance_experts(load, 80, 1, 1, 80)[0]
        for load in (before, before * rng.lognormal(0, 0.2, before.shape))
    ]

    assert (pair[0] == np.arange(80)).mean() > 0.75  # experts in order first
    assert (pair[0] != pair[1]).mean() < 0.2


def test_groups_stay_on_their_node() -> None:
    weight = np.random.default_rng(5).integers(1, 100, size=(4, 12))

    held, _, _ = rebalance_experts(weight, 16, 4, 2, 8)

    group = held.reshape(4, 2, 8) // 3
    for layer in range(4):
        assert set(group[layer, 0].tolist()).isdisjoint(group[layer, 1].tolist())


@pytest.mark.parametrize(("num_groups", "num_nodes", "num_gpus"), [(3, 2, 2), (1, 2, 3), (3, 2, 3)])
def test_drop_in_without_groups_on_nodes_needs_neither_to_divide(
    num_groups: int, num_nodes: int, num_gpus: int
) -> None:
    four = np.array([[60, 20, 20, 20]])

    found = rebalance_experts(four, 2 * num_gpus, num_groups, num_nodes, num_gpus)

    globally = rebalance_experts(four, 2 * num_gpus, 1, 1, num_gpus)
    assert all((one == other).all() for one, other in zip(found, globally, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 1, 1, 2), "2 replicas for 3 experts"),
        ((5, 1, 1, 2), "5 replicas on 2 GPUs"),
        ((6, 2, 2, 3), "3 GPUs on 2 nodes"),
        ((4, 2, 1, 2), "3 experts on 2 groups"),
        ((4, 1, 0, 2), "0 nodes"),
        ((8, 1, 1, 2), "leave slots empty"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    arguments: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rebalance_experts(SMALL, *arguments)
    with pytest.raises(HistoryError):
        rebalance_experts(np.array([[1.0, np.nan, 1.0]]), 4, 1, 1, 2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_gpus=st.integers(1, 5), slots=st.integers(1, 5), spare=st.integers(0, 4), seed=st.integers()
)
def test_no_gpu_holds_an_expert_twice(num_gpus: int, slots: int, spare: int, seed: int) -> None:
    num_replicas = num_gpus * slots
    num_experts = max(num_replicas - spare, slots)
    weight = np.random.default_rng(abs(seed)).integers(0, 1000, size=(2, num_experts))

    held, _, _ = rebalance_experts(weight, num_replicas, 1, 1, num_gpus)

    for on_gpu in held.reshape(-1, slots):
        assert len(set(on_gpu.tolist())) == slots
