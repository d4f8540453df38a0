"""Times of experts at a rank's start: which rows lie where, which layers run, and the budget."""

from __future__ import annotations

import torch

from eplb.decision.expert_times import POINTS
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import Experts, LoopExperts
from runtime.model.expert_times import MOST_ROWS, measure_experts
from tests.support.limits import NEVER_S

HIDDEN, LAYERS, SLOTS = 16, 3, 4


class NotedExperts:
    """Experts that note what they were given."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.layers: list[int] = []
        self.counts: dict[int, list[int]] = {}  # of slots, by the rows of a busy one

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Note, and compute."""
        counts = received.counts.tolist()
        assert len(received.rows) == sum(counts)
        self.layers.append(layer)
        self.counts[max(counts)] = counts
        return self._experts.run(layer, received)


def bank() -> ExpertBank:
    return ExpertBank(ExpertSchema.swiglu(HIDDEN, 8), LAYERS, SLOTS, num_staging=0)


def test_all_slots_have_the_rows_of_a_point_as_far_as_memory_goes() -> None:
    held = bank()
    noted = NotedExperts(LoopExperts(held))

    found = measure_experts(noted, held, HIDDEN, budget_s=NEVER_S)

    assert found.rows == sorted(POINTS) == sorted(noted.counts)
    assert found.of.endswith(f"NotedExperts, gate_up [16, {HIDDEN}] float32")
    for rows, counts in noted.counts.items():
        busy = min(SLOTS, MOST_ROWS // rows)
        assert counts == [rows] * busy + [0] * (SLOTS - busy)


def test_slots_after_the_banks_get_no_rows() -> None:
    held = bank()
    shared = {name: tensor[:1].clone() for name, tensor in held.weights(0).items()}
    noted = NotedExperts(LoopExperts(held, shared=[shared] * LAYERS))

    found = measure_experts(noted, held, HIDDEN, extra_slots=1, budget_s=NEVER_S)

    assert found.rows == sorted(POINTS)
    assert {(len(counts), counts[-1]) for counts in noted.counts.values()} == {(SLOTS + 1, 0)}


def test_layers_take_turns() -> None:
    held = bank()
    noted = NotedExperts(LoopExperts(held))

    measure_experts(noted, held, HIDDEN, budget_s=NEVER_S)

    assert {noted.layers.count(layer) > len(POINTS) for layer in range(LAYERS)} == {True}


def test_points_that_the_budget_does_not_allow_are_left_out() -> None:
    held = bank()

    assert measure_experts(LoopExperts(held), held, HIDDEN, budget_s=0.0).rows == [1]


def test_weights_are_as_they_were() -> None:
    held = bank()
    before = [held.digest(layer, slot) for layer in range(LAYERS) for slot in range(SLOTS)]

    measure_experts(LoopExperts(held), held, HIDDEN)

    assert before == [held.digest(layer, slot) for layer in range(LAYERS) for slot in range(SLOTS)]
