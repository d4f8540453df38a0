"""Times of experts at a rank's start, on a GPU: within the budget, and as a graph takes them."""

from __future__ import annotations

import pytest
import torch

from eplb.decision.expert_times import BUDGET_S, POINTS, chosen_curve
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import GroupedExperts
from runtime.model.expert_times import measure_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HIDDEN, INTERMEDIATE, LAYERS, SLOTS = 2048, 1024, 8, 4


def bank_of(schema: ExpertSchema) -> ExpertBank:
    num_bytes = bank_bytes(schema, LAYERS, SLOTS, 0)
    arena = PlainArena(num_bytes, torch.device("cuda", 0))
    bank = ExpertBank(schema, LAYERS, SLOTS, num_staging=0, arena=arena)
    for layer in range(LAYERS):
        for tensor in bank.weights(layer).values():
            tensor.copy_(torch.full(tensor.shape, 0.01).to(tensor.dtype))
    return bank


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_all_points_are_measured_within_the_budget(precision: str) -> None:
    is_fp8 = precision == "fp8"
    schema = (
        ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)
        if is_fp8
        else ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, torch.bfloat16)
    )
    bank = bank_of(schema)
    experts = GroupedExperts(bank, usual_rows=64)

    found = measure_experts(experts, bank, HIDDEN, fp8_rows=is_fp8)

    print(found)
    assert found.rows == sorted(POINTS)
    assert found.seconds <= BUDGET_S
    assert found.us[-1] > 4 * found.us[0]  # 4,096 rows against 1
    _, source = chosen_curve((), [found])
    assert source.startswith("measured at the start by one rank: ")


def test_memory_of_the_measurement_is_given_back() -> None:
    bank = bank_of(ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, torch.bfloat16))
    experts = GroupedExperts(bank, usual_rows=64)
    measure_experts(experts, bank, HIDDEN)  # what stays of the first run: the library's own
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    measure_experts(experts, bank, HIDDEN)

    assert torch.cuda.memory_reserved() <= before
