"""Pins as a live setting: what plans hold, what is recorded, and what is refused."""

from __future__ import annotations

import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from rebalance.controller.plans.planner_request import PlannerRequest, read_pins, written_pins
from tests.support.controlled_deployment import (
    EVEN,
    SKEWED,
    Deployment,
    events,
)

RANK_OF_SLOT = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3).rank_of_slot


def ranks_of(placement: Placement, expert: int) -> set[int]:
    return set(RANK_OF_SLOT[placement.slot_to_expert[0] == expert].tolist())


def test_pinned_expert_is_moved_though_the_load_is_even(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, EVEN)
    assert deployment.store.published() is None

    deployment.store.change_live({"pins": "0/0:1"}, reason="its users are near rank 1")
    deployment.decide_on(controller, EVEN)

    assert 1 in ranks_of(deployment.swap().target, 0)
    assert deployment.last_plan()["asked"]["pins"] == "0/0:1"
    deployment.decide_on(controller, SKEWED, windows=4)
    published = deployment.store.published()
    assert published is None or 1 in ranks_of(published.target, 0)
    assert events(deployment.store, "error") == []


def test_pin_that_cannot_be_met_is_recorded_and_ends_no_planning(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.store.change_live({"pins": "0/0:7, */2:0"}, reason="a rank that is gone")
    deployment.serve(SKEWED)

    controller.turn()

    assert 0 in ranks_of(deployment.swap().target, 2)
    asked = deployment.last_plan()["asked"]
    assert asked["num_unmet_pins"] == 1
    assert "layer 0 expert 0 on rank 7" in asked["unmet_pins"][0]
    assert events(deployment.store, "error") == []


def test_pins_are_read_back_as_they_were_written() -> None:
    pins = {(3, 17): (4, 0), 5: (2,), (0, 1): (1,)}

    text = written_pins(pins)

    assert text == "*/5:2, 0/1:1, 3/17:0+4"
    assert read_pins(text) == {5: (2,), (0, 1): (1,), (3, 17): (0, 4)}
    assert read_pins("") == {}


@pytest.mark.parametrize(
    "text", ["3:1", "3/1", "3/1:", "3/1:0+0", "3/1:0, 3/1:2", "-1/1:0", "a/1:0"]
)
def test_text_that_is_no_list_of_pins_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layer/expert:rank"):
        PlannerRequest(pins=text)
