from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rebalance.engines.vllm.process import layer_numbers
from rebalance.engines.vllm.tap import LoadTap, note_phases, phase_of

HELD = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0]])
LOAD = torch.tensor([[5, 7, 2, 9], [1, 2, 3, 4]], dtype=torch.int32)


def test_tap_sums_the_physical_experts_of_each_expert_over_passes() -> None:
    tap = LoadTap(2, 2, torch.device("cpu"), sample_steps=2)

    assert tap.add(LOAD, HELD, "decode", 7) == []
    (counted,) = tap.add(LOAD, HELD, "decode", 7)

    assert counted.tokens.tolist() == [[32, 14], [14, 6]]
    assert (counted.first_step, counted.last_step, counted.phase) == (0, 1, "decode")


def test_sample_ends_where_the_phase_changes() -> None:
    tap = LoadTap(2, 2, torch.device("cpu"), sample_steps=4)
    passes = ["decode", "decode", "prefill", None, "prefill"]

    done = [one for phase in passes for one in tap.add(LOAD, HELD, phase, 1)]

    assert [(one.phase, one.first_step, one.last_step) for one in done] == [
        ("decode", 0, 1),
        ("prefill", 2, 3),
    ]
    assert done[1].tokens.tolist() == [[16, 7], [7, 3]], "a dummy pass counts nothing"


@pytest.mark.parametrize(
    ("tokens", "speculative", "phase"),
    [
        ({"a": 1, "b": 1}, 0, "decode"),
        ({"a": 3, "b": 1}, 2, "decode"),
        ({"a": 512}, 0, "prefill"),
        ({"a": 512, "b": 1}, 0, "mixed"),
        ({}, 0, "decode"),
    ],
)
def test_phase_follows_the_tokens_of_each_request(
    tokens: dict[str, int], speculative: int, phase: str
) -> None:
    assert phase_of(tokens, speculative) == phase


def test_phases_are_noted_once_for_each_pass_of_a_runner() -> None:
    class Runner:
        num_spec_tokens = 1

        def execute_model(self, scheduler_output: object, more: int = 0) -> int:
            return more

    noted: list[str] = []
    for _ in range(2):
        note_phases(Runner, noted.append)
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 2})

    assert Runner().execute_model(scheduled, more=3) == 3
    assert Runner().execute_model("no output of a scheduler", 4) == 4
    assert noted == ["decode", "mixed"]


def test_layers_are_numbered_by_their_names() -> None:
    named = [SimpleNamespace(layer_name=f"model.layers.{n}.mlp.experts") for n in (3, 4, 7)]

    assert layer_numbers(named, 3) == (3, 4, 7)
    assert layer_numbers(named[:1] * 3, 3) == (0, 1, 2)
    assert layer_numbers([object()] * 2, 2) == (0, 1)
