"""Compares every layer output and every logit of a served model with the library's own.

A layer's output is compared with the library's experts on the same inputs. Logits are compared end
to end. There rounding may have a router choose another expert where two scores are almost equal,
and the answer is then another one. Such sequences are counted apart, by the routers' choices; their
layer outputs are compared as all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from runtime.integrations.transformers import find_experts

TOLERANCE = 1e-4  # of a layer's output or a logit, relative to the largest one of the pass


@dataclass
class Found:
    """What the comparisons of a rank found."""

    layer_outputs: int = 0  # [T, H] outputs of one MoE layer in one forward pass
    logits: int = 0  # sequences
    wrong_layer_outputs: int = 0
    wrong_logits: int = 0
    other_choices: int = 0  # sequences in which a router chose other experts
    worst_error: float = 0.0  # relative
    first_wrong: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Keeps the inputs and the output of one experts module in the latest forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.inputs: tuple[torch.Tensor, ...] = ()
        self.output = torch.empty(0)
        module.register_forward_hook(self._keep)

    def _keep(self, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.inputs, self.output = inputs, output


class Comparison:
    """Compares the forward passes of a served model with an unmodified one.

    Args:
        paths: of the experts modules, alike in both models.
    """

    def __init__(self, served: nn.Module, library: nn.Module, paths: list[str]) -> None:
        self._served, self._library = served, library
        self._of_served = [Recorder(served.get_submodule(path)) for path in paths]
        self._of_library = [Recorder(library.get_submodule(path)) for path in paths]
        self._modules = [library.get_submodule(path) for path in paths]
        self.found = Found()

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, where: dict[str, Any]) -> None:
        """Run both models on tokens [B, T], and compare."""
        served = self._served(input_ids=ids).logits
        expected = self._library(input_ids=ids).logits
        choices = [recorder.inputs[1] for recorder in self._of_library]
        self._compare_layers(where)
        same = torch.ones(len(ids), dtype=torch.bool)
        for recorder, chosen in zip(self._of_served, choices, strict=True):
            equal = recorder.inputs[1].sort().values == chosen.sort().values
            same &= equal.reshape(len(ids), -1).all(dim=1)
        found = self.found
        found.logits += len(ids)
        found.other_choices += int((~same).sum())
        error = _relative(served[same], expected[same])
        found.worst_error = max(found.worst_error, error)
        if not error <= TOLERANCE:
            found.wrong_logits += 1
            found.first_wrong = found.first_wrong or where | {"logits": error}

    def _compare_layers(self, where: dict[str, Any]) -> None:
        for number, (recorder, module) in enumerate(
            zip(self._of_served, self._modules, strict=True)
        ):
            error = _relative(recorder.output, module.forward(*recorder.inputs))
            self.found.layer_outputs += 1
            self.found.worst_error = max(self.found.worst_error, error)
            if not error <= TOLERANCE:  # a NaN is wrong too
                self.found.wrong_layer_outputs += 1
                self.found.first_wrong = self.found.first_wrong or where | {number: error}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max())


def least_visible_swap(library: nn.Module, ids: torch.Tensor) -> float:
    """Smallest relative change of a layer's output when one used expert is another.

    The tolerance means something only while this is far above it.
    """
    experts = find_experts(library)
    recorders = [Recorder(one.module) for one in experts]
    with torch.inference_mode():
        library(input_ids=ids)
    least = float("inf")
    for one, recorder in zip(experts, recorders, strict=True):
        expected = recorder.output.clone()
        hidden, chosen, shares = recorder.inputs
        for expert in chosen.unique().tolist():
            other = torch.where(
                chosen == expert, (expert + 1) % len(one.parameters["down_proj"]), chosen
            )
            with torch.inference_mode():
                least = min(least, _relative(one.module.forward(hidden, other, shares), expected))
    return least
