"""A layer of a toy engine on one rank, whose kernel takes a number that no tensor has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rebalance.engines.common.conform import LayerVerdict, Subject, prove
from rebalance.engines.common.fsck.check import EngineView

EXPERTS, SLOTS = 4, 6


@dataclass
class ToyLayer:
    """Weights of a layer, its map, and numbers by slot that the kernel multiplies with."""

    device: str = "cpu"
    held: np.ndarray = field(default_factory=lambda: np.arange(SLOTS)[None] % EXPERTS)
    layer: torch.nn.Module = field(default_factory=torch.nn.Module)
    calls: int = 0

    def __post_init__(self) -> None:
        drawn = torch.randn(EXPERTS, 8, generator=torch.Generator().manual_seed(0))
        weight = drawn[self.held[0]].to(self.device)
        self.layer.weight = torch.nn.Parameter(weight, requires_grad=False)
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
        factors = torch.tensor(self.factors, device=self.device)
        return self.layer.weight[:, None, :] * factors[:, None, None]

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
    engine: ToyLayer, move: Callable[[Any], None], outputs: Callable[[int], torch.Tensor] | None
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
