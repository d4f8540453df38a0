"""A layer is proved by the outputs of its kernel, and by nothing less."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rebalance.engines.common.conform import (
    NO_KERNELS,
    OUTPUT,
    LayerVerdict,
    Subject,
    from_json,
    prove,
    to_json,
)
from rebalance.engines.common.fsck.check import EngineView

EXPERTS, SLOTS = 4, 6


@dataclass
class Engine:
    """One layer on one rank; its kernel multiplies by a number that no tensor has."""

    held: np.ndarray = field(default_factory=lambda: np.arange(SLOTS)[None] % EXPERTS)
    layer: torch.nn.Module = field(default_factory=torch.nn.Module)
    calls: int = 0

    def __post_init__(self) -> None:
        drawn = torch.randn(EXPERTS, 8, generator=torch.Generator().manual_seed(0))
        self.layer.weight = torch.nn.Parameter(drawn[self.held[0]], requires_grad=False)
        self.factors = (1.0 + self.held[0]).tolist()

    def move(self, target: np.ndarray, *, is_whole: bool = True) -> None:
        source = [int(np.flatnonzero(self.held[0] == expert)[0]) for expert in target[0]]
        self.layer.weight.copy_(self.layer.weight[source].clone())
        if is_whole:
            self.factors = [self.factors[slot] for slot in source]
        self.held = target.copy()

    def forget(self, target: np.ndarray) -> None:
        self.move(target, is_whole=False)

    def outputs(self, row: int) -> torch.Tensor:
        return self.layer.weight[:, None, :] * torch.tensor(self.factors)[:, None, None]

    def alike(self, row: int) -> torch.Tensor:
        return torch.ones(SLOTS, 1, 8)

    def counting(self, row: int) -> torch.Tensor:
        self.calls += 1
        return self.outputs(row) + self.calls

    def infinite(self, row: int) -> torch.Tensor:
        return self.outputs(row) / 0

    def failing(self, row: int) -> torch.Tensor:
        raise RuntimeError("no image for this device")


def verdict(
    engine: Engine, move: Callable[[Any], None], outputs: Callable[[int], torch.Tensor] | None
) -> LayerVerdict:
    view = EngineView(
        [0], lambda row: (engine.layer, [engine.layer.weight]), lambda row: engine.held[0], 0, 1
    )

    def commit(target: Any) -> None:
        engine.held = target.copy()

    def gather(value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    (found,) = prove(Subject(view, gather, {0: "toy"}, move, commit, outputs), num_moves=2)
    return found


def test_layer_whose_outputs_follow_its_experts_is_proved() -> None:
    engine = Engine()

    found = verdict(engine, engine.move, engine.outputs)

    assert (found.result, found.faults) == ("proved", ())
    assert found.tensors == ("weight", OUTPUT)


def test_number_of_a_kernel_that_stays_behind_fails_though_all_bytes_are_right() -> None:
    engine = Engine()

    found = verdict(engine, engine.forget, engine.outputs)

    assert (found.result, found.step) == ("failed", "move 1")
    assert all(": output has the bytes of" in fault for fault in found.faults)


@pytest.mark.parametrize(
    ("outputs", "note"),
    [
        (None, NO_KERNELS),
        (Engine.failing, "RuntimeError: no image for this device"),
        (Engine.infinite, "outputs of the kernel are not finite, expected numbers"),
        (Engine.counting, "outputs of the kernel differ from call to call, expected the same"),
        (Engine.alike, "outputs of two experts are alike, expected others"),
    ],
)
def test_bytes_without_outputs_that_tell_experts_apart_prove_nothing(
    outputs: Callable[[Engine, int], torch.Tensor] | None, note: str
) -> None:
    engine = Engine()

    found = verdict(engine, engine.move, outputs and outputs.__get__(engine))

    assert (found.result, found.faults) == ("not proved", ())
    assert note in found.note


def test_exception_of_a_kernel_is_kept_with_its_trace() -> None:
    engine = Engine()

    found = verdict(engine, engine.move, engine.failing)

    assert "in failing" in found.trace
    assert from_json(to_json([found])) == [found]
