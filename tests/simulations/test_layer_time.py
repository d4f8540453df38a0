"""Time of a whole MoE layer: its parts that need no GPU, and predictions checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.simulator.layer_prediction import fitted_line, lines_of
from benchmarks.simulator.local_dispatch import LocalDispatcher
from eplb import Placement
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import LoopExperts, swiglu
from runtime.model.moe import MoELayer
from runtime.routing import RoutingTable

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 8, 16


def test_local_dispatcher_gives_the_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    schema = ExpertSchema.swiglu(HIDDEN, INTERMEDIATE)
    bank = ExpertBank(schema, 1, NUM_EXPERTS, num_staging=0)
    for tensor in bank.weights(0).values():
        tensor.normal_()
    counter = SlotCounter(1, NUM_EXPERTS)
    table = RoutingTable(Placement(np.arange(NUM_EXPERTS)[None], NUM_EXPERTS), max_replicas=1)
    dispatcher = LocalDispatcher(NUM_EXPERTS, counter)
    layer = MoELayer(0, TOP_K, LoopExperts(bank), table, dispatcher)
    tokens, weights = torch.randn((5, HIDDEN)), torch.rand((5, TOP_K))
    chosen = torch.tensor([[0, 1], [2, 0], [1, 0], [0, 2], [2, 1]])

    output = layer.forward(tokens, chosen, weights, salt=torch.zeros(1, dtype=torch.int64))

    gate_up, down = bank.weights(0)["gate_up"], bank.weights(0)["down"]
    wanted = torch.stack(
        [
            sum(
                weights[token, k] * swiglu(tokens[token], gate_up[expert], down[expert])
                for k, expert in enumerate(chosen[token].tolist())
            )
            for token in range(5)
        ]
    )
    torch.testing.assert_close(output, wanted)
    assert counter.drain().tolist() == [[4, 3, 3, 0]]


def record(**changes: Any) -> dict[str, Any]:
    """10 us a slot up to a tile of 64 rows, 20 us for two; 5 us and 0.1 us a row around."""
    layer = {
        "model": "small",
        "dtype": "fp8",
        "hidden": 128,
        "intermediate": 128,
        "num_experts": 2,
        "top_k": 1,
        "tilings": [{"tiles": [64]}],
        "even": [{"slots": 2, "rows": rows, "us": rows / 64 * 20} for rows in (64, 128)],
        "around": [
            {"tokens": 10, "before_us": 5.0, "around_us": 6.0},
            {"tokens": 30, "before_us": 5.0, "around_us": 8.0},
        ],
        "uneven": [
            {
                "skew": "strong",
                "mean_rows": 50,
                "tokens": 100,
                "counts": [20, 80],
                "us": 50.0,
                "around_us": 15.0,
                "experts_us": 40.0,
            }
        ],
    }
    return {
        "device": "card",
        "date": "2026-11-23",
        "software": "none",
        "layers": [layer | changes],
    }


def test_prediction_adds_whole_tiles_and_what_is_around_them() -> None:
    (line,) = lines_of(record())

    # 20 rows take one tile of 10 us, 80 rows two; around them 5 us and 100 rows of 0.1 us.
    assert line.predicted_us == pytest.approx(30.0 + 15.0)
    assert line.ratio == pytest.approx(0.9)
    assert line.experts_part == pytest.approx(30.0 / 40.0)
    assert line.around_part == pytest.approx(1.0)
    assert line.imbalance == pytest.approx(1.6)


def test_prediction_uses_no_figure_of_the_predicted_row() -> None:
    other = record()
    other["layers"][0]["uneven"][0] |= {"us": 1.0, "around_us": 2.0, "experts_us": 3.0}

    (one,), (two,) = lines_of(record()), lines_of(other)

    assert one.predicted_us == two.predicted_us


def test_line_through_times_is_never_negative() -> None:
    base, slope = fitted_line([10.0, 20.0, 30.0], [1.0, 4.0, 9.0])

    assert base == 0.0
    assert slope > 0
