"""The curve that the controller plans by: what ranks measured at their start, or was configured."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.decision.expert_times import ExpertTimes
from eplb.errors import ConfigError, StoreError
from rebalance.controller.plans.planner_request import PlannerRequest
from tests.support.controlled_deployment import SKEWED, Deployment
from tests.support.rank_reports import rank_report

# Thousands of rows a slot in a step are few where reading an expert takes as long as 14,900.
SLOW_READS = ExpertTimes([1, 16384], [5e5, 5.5e5], "a slow GPU, some kernel", 0.4)


def decided(
    deployment: Deployment, *measured: ExpertTimes | dict[str, Any] | None, **changes: Any
) -> dict[str, Any]:
    """The plan of a controller on skewed load, by what its ranks report."""
    for rank, times in enumerate(measured):
        given = vars(times) if isinstance(times, ExpertTimes) else times
        detail = {} if given is None else {"expert_times": given}
        deployment.store.report(rank_report(deployment.run, rank, **detail))
    deployment.serve(SKEWED)
    deployment.controller(**changes).turn()
    return deployment.last_plan()


def test_plan_follows_the_curve_that_ranks_measured(deployment: Deployment) -> None:
    found = decided(deployment, SLOW_READS, SLOW_READS)

    assert found["objective"] == "time"
    assert found["expert_curve"] == "measured at the start by 2 ranks: a slow GPU, some kernel"


@pytest.mark.parametrize(
    "other", [None, {"rows": "many"}], ids=["not measured", "figures that cannot be read"]
)
def test_curve_is_that_of_the_ranks_that_have_one(deployment: Deployment, other: Any) -> None:
    found = decided(deployment, SLOW_READS, other)

    assert found["objective"] == "time"
    assert found["expert_curve"].startswith("measured at the start by one rank: ")


def test_configured_curve_wins_over_the_measured_one(deployment: Deployment) -> None:
    request = PlannerRequest(curve="1:13.1, 1024:124.5")

    found = decided(deployment, SLOW_READS, SLOW_READS, request=request)

    assert (found["expert_curve"], found["objective"]) == ("given by the configuration", "tokens")
    assert found["asked"]["curve"] == "1:13.1, 1024:124.5"


@pytest.mark.parametrize("text", ["1:13", "64:15, 1:13", "1:20, 64:15", "1-13", "1:13, x:15"])
def test_text_that_is_no_curve_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tokens:us"):
        PlannerRequest(curve=text)


@pytest.mark.parametrize(
    "wrong", [{"rows": [1]}, {"rows": [2, 1]}, {"us": "fast"}, {"more": 1}, {"us": [None, 1.0]}]
)
def test_report_with_times_that_are_none_is_refused(wrong: dict[str, Any]) -> None:
    state = rank_report("run-1", 3, expert_times=vars(SLOW_READS) | wrong)

    with pytest.raises(StoreError, match=r"rank 3: expert_times"):
        _ = state.expert_times
