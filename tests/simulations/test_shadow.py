"""Shadow mode: both sides on the same windows, and what so many of them allow to say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.over_time.replay import Deployment
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.schemes import Course, Terms
from simulations.shadow.comparison import Account, Comparison, Group, received_by_rank
from simulations.shadow.report import FEWEST, Prices, difference_of, report
from simulations.shadow.sources import ObservedWindow, Skips
from simulations.workloads import Workload, generate
from telemetry.formats.types import rows_in_order

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


def test_experts_that_change_their_slot_within_a_rank_are_not_received() -> None:
    old = Placement(np.array([[0, 1, 0, 2, 3, 2]], dtype=np.int32), 4)
    new = Placement(np.array([[1, 0, 3, 2, 3, 2]], dtype=np.int32), 4)

    assert received_by_rank(old, new, TWO_RANKS).tolist() == [1, 0]


def held(*rows: list[int], generation: int = 0) -> Placement:
    return Placement(np.array(rows, dtype=np.int32), 4, generation)


def observed(*loads: list[int], map_: Placement | None = None) -> list[ObservedWindow]:
    """A window of one layer for each load."""
    layers = rows_in_order(1)
    return [
        ObservedWindow(np.array([load]), layers, map_, f"window {index}")
        for index, load in enumerate(loads)
    ]


def test_moves_are_booked_in_the_first_window_that_they_serve() -> None:
    cost = CostModel(seconds_per_rebalance=0.5, seconds_per_expert=2.0)
    model = ModelShape((0,), 4, 1, 0, 0, expert_bytes=100)
    first, second = held([0, 1, 0, 2, 3, 2]), held([3, 1, 0, 2, 3, 2])
    account = Account(Terms(TWO_RANKS, model, cost=cost), first)

    for placement in (first, second, second):
        account.judge(np.array([[40, 10, 20, 30]]), placement)

    # Equal shares: 40 + 10 against 20 + 30; then 40 + 10 + 15 against 20 + 15.
    assert account.imbalance.tolist() == [1.0, 1.3, 1.3]
    assert account.received.tolist() == [0, 1, 0]
    assert account.seconds.tolist() == [0, 2.5, 0]


def test_window_is_judged_under_what_was_planned_before_it() -> None:
    windows = observed(*[[900, 50, 25, 25]] * 3, [25, 25, 50, 900])
    comparison = Comparison(Group(Terms(TWO_RANKS), 2), Skips())
    for window in windows[:-1]:
        comparison.add(window)
    assert comparison.engine is not None
    served = [comparison.engine.serving, comparison.ours[0].course.serving]

    comparison.add(windows[-1])

    judged = [comparison.engine.account.serving, comparison.ours[0].account.serving]
    assert [one is two for one, two in zip(served, judged, strict=True)] == [True, True]
    assert comparison.engine.serving is not served[0]  # planned on that window, for the next one


@pytest.mark.slow
def test_course_decides_as_the_controller_does() -> None:
    load = generate(Workload("gamma", layers=2, experts=8, windows=24), seed=3).tokens
    load = np.concatenate([load, load[:, :, ::-1]])
    topology = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=3)
    deployment = Deployment(topology, load[0], top_k=2)
    model = ModelShape((0, 1), 8, 2, 2048, 1408)
    course = Course(Terms(topology, model), "auto", deployment.placement)
    num_changes = 0

    for window, tokens in enumerate(load):
        num_changes += deployment.serve(tokens) is not None
        course.plan_after(window, LoadHistory(load[: window + 1]))

        assert np.array_equal(course.serving.slot_to_expert, deployment.placement.slot_to_expert), (
            window
        )
        assert np.allclose(course.serving.slot_share, deployment.placement.slot_share), window
    assert num_changes > 1


@pytest.mark.parametrize(
    ("load", "row", "kind"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3, 0, 1], "no tokens"),
        ([4, 3, 2, 1], [0, 1, 2, 3], "a map of another width"),
        ([4, 3, 2, 1], [0, 0, 1, 2, 3, 2], "a map that the rule cannot serve"),
        ([4, 3, 2, 1], None, "a window without a map"),
        ([4, 3, 2, 1, 1], None, "another model"),
    ],
)
def test_window_that_does_not_fit_is_skipped_with_its_kind(
    load: list[int], row: list[int] | None, kind: str
) -> None:
    (good,) = observed([4, 3, 2, 1], map_=held([0, 1, 2, 3, 0, 1]))
    (bad,) = observed(load, map_=None if row is None else held(row))
    comparison = Comparison(Group(Terms(TWO_RANKS, dispatch=DispatchRule.ASCEND_MOD)), Skips())

    assert comparison.add(good)
    assert not comparison.add(bad)
    assert comparison.skips.counts()[kind]["count"] == 1


def test_report_names_what_stands_in_for_missing_maps() -> None:
    comparison = Comparison(Group(Terms(TWO_RANKS), 2), Skips())
    for window in observed([4, 3, 2, 1], [4, 3, 2, 1]):
        comparison.add(window)

    sentences = report(comparison, Prices(), [])["sentences"]

    assert "engine: its algorithm replayed (DeepSeek's EPLB)" in sentences
    assert "the source has no maps: the engine begins with experts in order" in sentences


def test_all_idle_windows_give_a_report_without_figures() -> None:
    comparison = Comparison(Group(Terms(TWO_RANKS), 2), Skips())

    assert not comparison.add(observed([0, 0, 0, 0])[0])

    found = report(comparison, Prices(), [])
    assert found["sentences"] == ["no window could be used: nothing was compared"]
    assert found["windows"]["skipped"]["no tokens"]["count"] == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_redundant": 1}, "4 experts and 1 redundant ones on 2 ranks"),
        ({"num_redundant": 4}, "the map has 6 slots, expected 8"),
        ({"terms": Terms(TWO_RANKS, ModelShape((0,), 5, 1, 0, 0))}, "the model 1 x 5"),
    ],
)
def test_first_window_that_contradicts_what_was_stated_is_refused(
    changed: dict[str, Any], why: str
) -> None:
    (window,) = observed([4, 3, 2, 1], map_=held([0, 1, 0, 2, 3, 2]))
    group = Group(**{"terms": Terms(TWO_RANKS)} | changed)

    with pytest.raises(ConfigError, match=why):
        Comparison(group, Skips()).add(window)


def test_fewer_slots_free_memory_of_a_rank() -> None:
    model = ModelShape((0,), 4, 1, 0, 0, expert_bytes=100)
    comparison = Comparison(Group(Terms(TWO_RANKS, model), 2, also_redundant=(0,)), Skips())
    for window in observed(*[[4, 3, 2, 1]] * 2):
        comparison.add(window)

    found = report(comparison, Prices(kv_token_bytes=30), [])["ours"][1]

    assert found["kv_bytes_freed_per_rank"] == 100
    assert found["kv_tokens_freed_per_rank"] == 3


def test_difference_tells_only_what_so_many_windows_allow() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.1, 64)

    def verdict(series: Any) -> str:
        return difference_of(series, 0, least=1e-4).verdict

    few = difference_of(np.full(FEWEST - 1, 0.1), 0, least=1e-4)
    assert (few.verdict, few.interval) == ("too few windows", None)
    assert verdict(0.1 + noise) == "better"
    assert verdict(noise - 0.1) == "worse"
    assert verdict(noise - noise.mean()) == "cannot tell"
    assert verdict(np.zeros(64)) == "no difference"


def test_interval_of_independent_windows_is_that_of_student() -> None:
    series = np.random.default_rng(5).normal(0.0, 1.0, 400)

    found = difference_of(series, 0, least=0).interval

    assert found == difference_of(series, 0, least=0).interval
    assert found != difference_of(series, 1, least=0).interval
    assert found is not None
    half = 1.97 * series.std(ddof=1) / 20
    assert (found[1] - found[0]) / 2 == pytest.approx(half, rel=0.2)


def test_interval_is_wider_where_windows_resemble_their_neighbours() -> None:
    series = np.repeat(np.random.default_rng(1).normal(0.0, 0.1, 64), 4)
    shuffled = np.random.default_rng(2).permutation(series)

    together, alone = (difference_of(one, 0, least=0).interval for one in (series, shuffled))

    assert together is not None
    assert alone is not None
    assert together[1] - together[0] > 1.5 * (alone[1] - alone[0])  # 2 with enough windows
