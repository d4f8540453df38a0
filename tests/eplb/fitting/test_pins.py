"""Pins that fit, and the sentence for each that does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb import Topology
from eplb.fitting import Pins, fitting_pins

# Two ranks of three slots for four experts: two slots beyond one for each expert.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
ROOM = np.full((2, 2), 3)


def test_pins_of_one_layer_and_of_each_layer_are_taken_together() -> None:
    found = fitting_pins({3: (1,), (0, 3): (0,)}, ROOM, TOPOLOGY, 4)

    assert found.pinned == {(0, 3): (1, 0), (1, 3): (1,)}
    assert found.left.tolist() == [[2, 2], [3, 2]]
    assert found.unmet == ()
    assert (ROOM == 3).all()


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({(2, 0): (0,)}, "layer 2 expert 0: expected layers 0..1 and experts 0..3"),
        ({(0, 4): (0,)}, "layer 0 expert 4: expected layers 0..1 and experts 0..3"),
        ({(0, 0): (2,)}, "layer 0 expert 0 on rank 2: expected ranks 0..1"),
        (
            {(0, expert): (1,) for expert in range(4)},
            "layer 0 expert 3 on rank 1: pins or a cordon take every slot there that may be used",
        ),
        (
            {(0, expert): (0, 1) for expert in range(3)},
            "layer 0 expert 2 on rank 1: every slot that may be used is needed by an expert "
            "without another",
        ),
    ],
)
def test_pin_that_cannot_be_met_is_left_out_with_a_sentence(pins: Pins, expected: str) -> None:
    found = fitting_pins(pins, ROOM, TOPOLOGY, 4)

    assert found.unmet == (expected,)
    assert sum(map(len, found.pinned.values())) == sum(map(len, pins.values())) - 1


def test_pin_to_a_dead_rank_is_left_out() -> None:
    topology = replace(TOPOLOGY, alive=np.array([True, False]))

    found = fitting_pins({(0, 1): (0, 1)}, np.array([[4, 0]] * 2), topology, 4)

    assert found.pinned == {(0, 1): (0,)}
    assert found.unmet == ("layer 0 expert 1 on rank 1: the rank is not alive",)


def test_no_pin_is_taken_where_expert_groups_stay_on_nodes() -> None:
    topology = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=3)

    found = fitting_pins({(0, 0): (1,)}, ROOM, topology, 4, num_groups=2)

    assert found.pinned == {}
    assert "2 expert groups stay each on one of 2 nodes" in found.unmet[0]
    assert fitting_pins({}, ROOM, topology, 4, num_groups=2).unmet == ()
