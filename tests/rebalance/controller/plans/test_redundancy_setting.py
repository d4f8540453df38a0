"""Redundant slots of a layer as a live setting: what plans use, what is recorded and refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.decision.alternatives import ENOUGH
from eplb.errors import ConfigError
from eplb.migration.build import Pace
from rebalance.controller.plans.planner_request import PlannerRequest, redundancy_of
from tests.support.controlled_deployment import SKEWED, Clock, Deployment, events
from tests.support.stores import MemoryStore

TWO_LAYERS = ModelShape((3, 4), 4, 2, hidden=16, intermediate=8)
START = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]] * 2), num_experts=4)


@pytest.fixture
def deployment() -> Deployment:
    store = MemoryStore("test", clock=Clock())
    store.commit(START, expected=None, reason="start")
    return Deployment(store, model=TWO_LAYERS)


def num_held(placement: Placement) -> list[int]:
    return (placement.slot_to_expert != EMPTY).sum(axis=1).tolist()


def test_layer_uses_only_its_redundant_slots_and_the_plan_records_it(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    deployment.store.change_live({"redundancy": "4:0"}, reason="layer 4 is even")
    deployment.decide_on(controller, SKEWED)

    few = deployment.swap()

    assert num_held(few.target)[0] > 4
    assert num_held(few.target)[1] == 4
    assert deployment.last_plan()["asked"]["redundancy"] == "4:0"

    deployment.store.change_live({"redundancy": None}, reason="all of them again")
    deployment.decide_on(controller, SKEWED)
    assert num_held(deployment.swap().target)[1] > 4


def test_layer_gives_slots_up_whatever_that_costs_in_balance(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    deployment.swap()

    deployment.store.change_live({"redundancy": "3:0, 4:1"}, reason="fewer bytes to move")
    deployment.decide_on(controller, SKEWED)
    assert num_held(deployment.swap().target) == [4, 5]

    # A plan that had to be made promised no gain, so none is missed.
    deployment.store.change_live({"pay_back_s": 0.0}, reason="a test")
    deployment.decide_on(controller, SKEWED, windows=ENOUGH + 1)
    assert events(deployment.store, "promise") == events(deployment.store, "error") == []


def test_spare_slots_of_flip_mode_are_no_redundant_ones(deployment: Deployment) -> None:
    deployment.store.change_live({"redundancy": "3:1"}, reason="a test")
    deployment.serve(SKEWED)

    deployment.controller(pace=Pace(mode="flip", spare_slots=1)).turn()

    assert deployment.store.published() is None
    (error,) = events(deployment.store, "error")
    assert "layer 3 1 redundant slots" in error.detail["message"]


def test_slots_of_dead_ranks_are_not_missed() -> None:
    alive = np.array([True, True, False])
    ranks = replace(Topology.uniform(1, 3, slots_per_rank=3), alive=alive)
    request = PlannerRequest(redundancy="2:5, 3:1")

    slots = request.slots(ranks, ModelShape((2, 3, 5), 4, 1, hidden=2, intermediate=2))

    assert slots is not None
    assert slots.tolist() == [[3, 3, 0], [3, 2, 0], [3, 3, 0]]


@pytest.mark.parametrize("text", ["0", "0:-1", "-1:2", "0:1.5", "0:1, 0:2", "0:nan", "0:1e99"])
def test_text_that_is_no_list_of_slots_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layer:slots"):
        redundancy_of(text)
