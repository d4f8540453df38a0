"""The layers that a turn of the controller plans, within the time that a plan may take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.search.local_search import STEPS_OF_LAYER, step_ms
from rebalance.controller.plans.planning import Past, Planning
from tests.support.controlled_deployment import SETTINGS
from tests.support.stores import MemoryStore

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)
SERVING = Placement(np.array([[0, 1]] * 4), num_experts=2)
EACH_MS = STEPS_OF_LAYER * step_ms(TWO_RANKS, SETTINGS.plan_windows, is_fresh=False)


def past(*hot: int) -> Past:
    """One window of layers in which expert 0 has so many of 10 tokens."""
    window = LoadHistory(np.array([[[tokens, 10 - tokens] for tokens in hot]]))
    return Past(window, window, 0, -1)


@pytest.fixture
def planning() -> Planning:
    return Planning(MemoryStore("test"), lambda: 0.0)


def test_worst_layers_come_first_and_each_once_in_a_round(planning: Planning) -> None:
    settings = replace(SETTINGS, turn_ms=2.5 * EACH_MS)

    turns = [
        planning.layers_of_turn(TWO_RANKS, settings, past(5, 6, 8, 7), SERVING) for _ in range(3)
    ]

    assert [sorted(layers) for layers in turns if layers is not None] == [[2, 3], [0, 1], [2, 3]]


def test_all_layers_are_planned_where_much_is_lost(planning: Planning) -> None:
    settings = replace(SETTINGS, turn_ms=2.5 * EACH_MS)

    assert planning.layers_of_turn(TWO_RANKS, settings, past(9, 9, 9, 9), SERVING) is None


@pytest.mark.parametrize("turn_ms", [0.0, 4.5 * EACH_MS], ids=["no limit", "time for all"])
def test_all_layers_are_planned_within_the_time(planning: Planning, turn_ms: float) -> None:
    settings = replace(SETTINGS, turn_ms=turn_ms)

    assert planning.layers_of_turn(TWO_RANKS, settings, past(5, 6, 8, 7), SERVING) is None
