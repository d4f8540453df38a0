"""The plain reference on a model small enough to compute by hand: what it accepts and refuses.

One layer of two experts, hidden size 4. Token 0 is [1, 0, 0, 0] and belongs to expert 0, which adds
nothing; token 1 is [0, 1, 0, 0] and belongs to expert 1, which makes [0, 1, 1, 0] of it.
"""

from __future__ import annotations

import math

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.decision.expert_times import POINTS
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import Experts, LoopExperts, swiglu
from runtime.model.expert_times import MOST_ROWS, measure_experts
from runtime.model.moe import Forward
from runtime.model.reference import ReferenceModel
from tests.support.limits import NEVER_S

ROOT_2 = math.sqrt(2.0)
IDS = torch.tensor([[0, 1]])
RIGHT = [[2.0, 0.0, 0.0, 0.0], [0.0, ROOT_2, ROOT_2, 0.0]]  # with a root mean square of 1
ROUTES = [[[0], [1]]]
UP = ("gate", "up")


def weights(gate: list[list[float]]) -> dict[str, torch.Tensor]:
    layer = "model.layers.0"
    nothing = {
        f"{layer}.self_attn.qkv_proj.weight": torch.zeros(12, 4),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(4, 4),
        **{f"{layer}.mlp.experts.0.{part}_proj.weight": torch.zeros(1, 4) for part in UP},
        f"{layer}.mlp.experts.0.down_proj.weight": torch.zeros(4, 1),
    }
    # silu(20) x 0.1 is 2, and half of it goes to the third place.
    expert_1 = {"gate": [[0.0, 10.0, 0.0, 0.0]], "up": [[0.0, 0.05, 0.0, 0.0]]}
    return nothing | {
        "model.embed_tokens.weight": torch.eye(4)[:2],
        f"{layer}.mlp.gate.weight": torch.tensor(gate),
        **{f"{layer}.mlp.experts.1.{p}_proj.weight": torch.tensor(expert_1[p]) for p in UP},
        f"{layer}.mlp.experts.1.down_proj.weight": torch.tensor([[0.0], [0.0], [0.5], [0.0]]),
    }


OWN_EXPERT = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


def reference(gate: list[list[float]] = OWN_EXPERT, top_k: int = 1) -> ReferenceModel:
    return ReferenceModel(ModelShape((0,), 2, top_k, hidden=4, intermediate=1), weights(gate))


def answer(hidden: list[list[float]], experts: list[list[list[int]]] = ROUTES) -> Forward:
    return Forward(torch.tensor(hidden), torch.tensor(experts))


OTHER = [RIGHT[0], [0.0, 2.0, 0.0, 0.0]]  # token 1 by expert 0
# [0, 2 - root 2, -root 2, 0] has length 1.53; what is right has length 2.
FAR_OFF = math.hypot(2 - ROOT_2, ROOT_2) / 2


@pytest.mark.parametrize(
    ("hidden", "routes", "error", "wrong_routes"),
    [(RIGHT, ROUTES, 0.0, 0), (OTHER, ROUTES, FAR_OFF, 0), (OTHER, [[[0], [0]]], 0.0, 1)],
    ids=["right", "result of another expert", "wrong route with its consistent result"],
)
def test_results_and_routes_are_judged_apart(
    hidden: list[list[float]], routes: list[list[list[int]]], error: float, wrong_routes: int
) -> None:
    check = reference().check(IDS, answer(hidden, routes))

    assert check.max_error == pytest.approx(error, rel=1e-4, abs=1e-5)
    assert check.wrong_routes == wrong_routes
    assert reference().check(IDS, answer(hidden, routes), forced=True).wrong_routes == 0


def test_either_expert_of_a_tie_is_right_and_one_chosen_twice_is_wrong() -> None:
    undecided = reference([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])

    for expert in (0, 1):
        assert undecided.check(IDS, answer(RIGHT, [[[0], [expert]]])).wrong_routes == 0
    assert reference(top_k=2).check(IDS, answer(RIGHT, [[[0, 1], [1, 1]]])).wrong_routes == 1


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_nan_difference_never_counts_as_small(damage: float) -> None:
    check = reference().check(IDS, answer([RIGHT[0], [0.0, damage, 1.0, 0.0]]))

    assert not check.max_error <= 1e-4


HIDDEN, INTERMEDIATE = 8, 16
COUNTS = (3, 0, 2, 4)


@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_each_slot_has_its_own_weights(layout: str) -> None:
    torch.manual_seed(1)
    bank = ExpertBank(ExpertSchema.swiglu(HIDDEN, INTERMEDIATE), 1, 4, num_staging=0)
    routed = bank.weights(0)
    for tensor in routed.values():
        tensor.normal_()
    pieces = [torch.randn((count, HIDDEN)) for count in COUNTS]
    rows = torch.cat(pieces)
    if layout == "padded":
        rows = torch.full((4, 5, HIDDEN), float("nan"))
        for slot, piece in enumerate(pieces):
            rows[slot, : len(piece)] = piece

    results = LoopExperts(bank).run(0, Received(rows, torch.tensor(COUNTS), None))

    assert results.shape == rows.shape
    found = results.split(COUNTS) if layout == "grouped" else results
    for slot, piece in enumerate(pieces):
        expected = swiglu(piece, routed["gate_up"][slot], routed["down"][slot])
        torch.testing.assert_close(found[slot][: len(piece)], expected)


TIMED_HIDDEN, LAYERS, SLOTS = 16, 3, 4


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
    return ExpertBank(ExpertSchema.swiglu(TIMED_HIDDEN, 8), LAYERS, SLOTS, num_staging=0)


def test_all_slots_have_the_rows_of_a_point_as_far_as_memory_goes() -> None:
    held = bank()
    noted = NotedExperts(LoopExperts(held))

    found = measure_experts(noted, held, TIMED_HIDDEN, budget_s=NEVER_S)

    assert found.rows == sorted(POINTS) == sorted(noted.counts)
    assert found.of.endswith(f"NotedExperts, gate_up [16, {TIMED_HIDDEN}] float32")
    for rows, counts in noted.counts.items():
        busy = min(SLOTS, MOST_ROWS // rows)
        assert counts == [rows] * busy + [0] * (SLOTS - busy)


def test_layers_take_turns() -> None:
    held = bank()
    noted = NotedExperts(LoopExperts(held))

    measure_experts(noted, held, TIMED_HIDDEN, budget_s=NEVER_S)

    assert {noted.layers.count(layer) > len(POINTS) for layer in range(LAYERS)} == {True}


def test_points_that_the_budget_does_not_allow_are_left_out() -> None:
    held = bank()

    assert measure_experts(LoopExperts(held), held, TIMED_HIDDEN, budget_s=0.0).rows == [1]


def test_weights_are_as_they_were() -> None:
    held = bank()
    before = [held.digest(layer, slot) for layer in range(LAYERS) for slot in range(SLOTS)]

    measure_experts(LoopExperts(held), held, TIMED_HIDDEN)

    assert before == [held.digest(layer, slot) for layer in range(LAYERS) for slot in range(SLOTS)]
