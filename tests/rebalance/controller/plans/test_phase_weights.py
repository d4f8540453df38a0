"""Ranks that serve both phases: a plan weighs prefill and decode, whatever their tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.load import Phase
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.alternatives import ENOUGH
from eplb.errors import ConfigError
from eplb.measure import imbalance
from rebalance.controller.plans.planner_request import PlannerRequest
from tests.support.controlled_deployment import SETTINGS, WINDOW_STEPS, Clock, Deployment, events
from tests.support.stores import MemoryStore

# 4 experts in 4 slots of 2 ranks: which two share a rank is all that a plan decides.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
START = Placement(np.array([[0, 1, 2, 3]]), num_experts=4)
# Ranks of the pairs 01|23: 1.18. Of 03|12: 1.22. Of 02|13: 1.6.
PREFILL = [500_000, 90_000, 300_000, 110_000]
# Ranks of the pairs 01|23: 1.8. Of the other two: 1.1. In the sum it is 1 % of the tokens.
DECODE = [5_000, 4_000, 500, 500]
BOTH: dict[Phase, list[int]] = {"prefill": PREFILL, "decode": DECODE}


def serve(deployment: Deployment, loads: dict[Phase, list[int]], windows: int = 1) -> None:
    """Report windows of which each phase has some of the steps."""
    steps = WINDOW_STEPS // len(loads)
    committed = deployment.store.committed()
    assert committed is not None
    placement = committed.placement
    for _ in range(windows):
        for number, (phase, load) in enumerate(loads.items()):
            first = deployment.next_window * WINDOW_STEPS + number * steps
            tokens = np.array(load)[placement.slot_to_expert] * placement.slot_share
            samples = [
                replace(
                    deployment.sample(rank, placement, tokens),
                    phase=phase,
                    sequence=deployment.next_window * len(loads) + number,
                    first_step=first,
                    last_step=first + steps - 1,
                )
                for rank in deployment.ranks
            ]
            deployment.store.append(samples)
        deployment.next_window += 1


@pytest.fixture
def deployment() -> Deployment:
    store = MemoryStore("test", clock=Clock())
    store.commit(START, expected=None, reason="start")
    return Deployment(store, topology=TOPOLOGY)


def weighing(decode_weight: float, **more: Any) -> dict[str, Any]:
    return {"request": PlannerRequest(decode_weight=decode_weight)} | more


def mean_of_both(placement: Placement) -> float:
    loads = np.array([[PREFILL], [DECODE]])
    return float(imbalance(loads, placement, TOPOLOGY).mean())


def planned(deployment: Deployment, changes: dict[str, Any]) -> dict[str, Any]:
    deployment.controller(**changes).turn()
    return deployment.last_plan()


def test_sum_of_phases_hides_decode(deployment: Deployment) -> None:
    serve(deployment, BOTH, windows=4)

    decided = planned(deployment, weighing(0.0))

    assert decided["decision"] == "KEEP"
    assert decided["imbalance_before"] == pytest.approx(599 / 505, abs=1e-4)
    assert "phases" not in decided
    assert mean_of_both(START) == pytest.approx(1.49)


def test_weight_is_the_part_of_windows_that_are_of_decode(deployment: Deployment) -> None:
    serve(deployment, BOTH, windows=12)

    few = planned(deployment, weighing(0.25, stage="observe"))
    serve(deployment, BOTH)
    many = planned(deployment, weighing(0.75, stage="observe", plan_windows=12))

    assert [one["windows"] for one in few["phases"]] == [12, 4]
    assert [one["windows"] for one in many["phases"]] == [4, 12]
    assert few["imbalance_before"] == pytest.approx(0.75 * 1.18 + 0.25 * 1.8)
    assert many["imbalance_before"] == pytest.approx(0.25 * 1.18 + 0.75 * 1.8)


def test_ranks_of_one_phase_are_planned_on_as_without_a_weight(deployment: Deployment) -> None:
    serve(deployment, {"decode": DECODE}, windows=4)

    decided = planned(deployment, weighing(0.5))

    assert decided["windows"] == 4
    assert decided["imbalance_before"] == pytest.approx(1.8)
    assert "phases" not in decided


def test_changing_mix_of_phases_is_no_change_of_load(deployment: Deployment) -> None:
    serve(deployment, {"prefill": PREFILL, "decode": DECODE}, windows=8)
    more_decode: dict[Phase, list[int]] = {
        "prefill": [one // 100 for one in PREFILL],
        "decode": [one * 100 for one in DECODE],
    }
    serve(deployment, more_decode, windows=8)

    weighed = planned(deployment, weighing(0.5, stage="observe"))
    summed = planned(deployment, weighing(0.0, stage="observe"))

    assert [one["windows"] for one in weighed["phases"]] == [16, 16]
    assert summed["windows"] == 8


def test_plan_is_judged_on_both_phases(deployment: Deployment) -> None:
    controller = deployment.controller(**weighing(0.5))
    serve(deployment, BOTH, windows=4)
    controller.turn()
    deployment.swap()
    serve(deployment, BOTH, windows=ENOUGH)

    controller.turn()

    (judged,) = events(deployment.store, "promise")
    assert judged.detail["promised"] == pytest.approx(0.33)
    assert judged.detail["given"] == pytest.approx(0.33)


def test_imbalance_that_starts_a_plan_is_the_mean_of_both(deployment: Deployment) -> None:
    rules = replace(SETTINGS.triggers, start_imbalance=1.4, interval_s=1e6)
    calm: dict[Phase, list[int]] = {"prefill": PREFILL, "decode": [5_000, 500, 4_000, 500]}
    controller = deployment.controller(**weighing(0.5, triggers=rules, stage="observe"))
    serve(deployment, calm)
    controller.turn()
    serve(deployment, calm)
    controller.turn()
    serve(deployment, BOTH)
    controller.turn()

    found = [event.detail["trigger"] for event in events(deployment.store, "plan")]
    assert found == ["first", "imbalance"]


@pytest.mark.parametrize("weight", [-0.1, 1.0, float("nan")])
def test_weight_that_no_plan_can_use_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="decode_weight"):
        PlannerRequest(decode_weight=weight)
