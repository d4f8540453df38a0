"""Experts of a bank's slots and of shared slots after them, on a CPU."""

from __future__ import annotations

import pytest
import torch

from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import LoopExperts, swiglu

HIDDEN, INTERMEDIATE, WIDER = 8, 16, 24
COUNTS = (3, 0, 2, 4)  # the last of the shared slot


@pytest.mark.parametrize("layout", ["grouped", "padded"])
@pytest.mark.parametrize("width", [INTERMEDIATE, WIDER])
def test_each_slot_has_its_own_weights_the_shared_one_too(width: int, layout: str) -> None:
    torch.manual_seed(1)
    bank = ExpertBank(ExpertSchema.swiglu(HIDDEN, INTERMEDIATE), 1, 3, num_staging=0)
    routed = bank.weights(0)
    for tensor in routed.values():
        tensor.normal_()
    shared = {
        "gate_up": torch.randn((1, 2 * width, HIDDEN)),
        "down": torch.randn((1, HIDDEN, width)),
    }
    pieces = [torch.randn((count, HIDDEN)) for count in COUNTS]
    rows = torch.cat(pieces)
    if layout == "padded":
        rows = torch.full((4, 5, HIDDEN), float("nan"))
        for slot, piece in enumerate(pieces):
            rows[slot, : len(piece)] = piece

    results = LoopExperts(bank, shared=[shared]).run(0, Received(rows, torch.tensor(COUNTS), None))

    assert results.shape == rows.shape
    found = results.split(COUNTS) if layout == "grouped" else results
    for slot, piece in enumerate(pieces):
        weights, place = (shared, 0) if slot == 3 else (routed, slot)
        expected = swiglu(piece, weights["gate_up"][place], weights["down"][place])
        torch.testing.assert_close(found[slot][: len(piece)], expected)
