"""The tensors of a layer's experts: those that an engine moves, and what it derived from them.

Shapes:  C slots of this rank, S slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

LANE_BYTES = 4
# Of tensors that an engine does not move. Whole numbers are maps and counters, not weights.
WHOLE = (torch.int16, torch.int32, torch.int64, torch.bool)


@dataclass(frozen=True, eq=False)
class SlotTensor:
    """A tensor with a row for each slot."""

    name: str
    tensor: torch.Tensor  # [C, ...], or [S, ...]
    first: int  # row of this rank's first slot

    def record(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot of this rank, 0..C-1."""
        return as_bytes(self.tensor[self.first + slot])


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """What a rank computes a layer's experts with."""

    moved: tuple[torch.Tensor, ...]  # [C, ...] what the engine moves, in its order
    slots: tuple[SlotTensor, ...]  # those that it moves first
    factors: tuple[tuple[str, torch.Tensor], ...]  # one number for all experts of the rank


class EngineView(Protocol):
    """Where an engine has its experts."""

    rank: int
    num_ranks: int

    @property
    def rows(self) -> Sequence[int]:
        """Layers with routed experts, by the engine's numbers."""

    def tensors(self, row: int) -> LayerTensors:
        """Return the tensors of a layer as they are now: a reload may replace them."""

    def held(self, row: int) -> NDArray[np.int64]:
        """Return [S] experts by slot, by the map that serves."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order, and zeros up to a whole digest lane.

    A copy where the tensor is not contiguous, or has such zeros.
    """
    found = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = -found.numel() % LANE_BYTES
    return torch.nn.functional.pad(found, (0, rest)) if rest else found


def owners_of(model: torch.nn.Module, moved: Sequence[torch.Tensor]) -> list[str]:
    """Names of the modules that hold one of these tensors, or a view of it."""
    known = {tensor.untyped_storage().data_ptr() for tensor in moved}
    return [
        name
        for name, module in model.named_modules()
        if any(tensor.untyped_storage().data_ptr() in known for _, tensor in _direct(module))
    ]


def tensors_of(
    moved: Sequence[torch.Tensor],
    model: torch.nn.Module,
    owners: Iterable[str],
    rank: int,
    num_ranks: int,
) -> LayerTensors:
    """The tensors that an engine moves, and further ones of the modules that own them.

    Modules are looked up by name, since a reload may make new ones.
    """
    each = moved[0].shape[0]
    named = {
        _place(tensor): (name, tensor)
        for owner in owners
        for name, tensor in _direct(model.get_submodule(owner))
    }
    slots = [
        SlotTensor(named.pop(_place(tensor), (f"weight {number}",))[0], tensor, 0)
        for number, tensor in enumerate(moved)
    ]
    factors = []
    for name, tensor in named.values():
        if tensor.dtype in WHOLE or tensor.device.type == "meta":
            continue
        if tensor.numel() == 1:
            factors.append((name, tensor))
        elif tensor.dim() and tensor.shape[0] in (each, each * num_ranks):
            first = 0 if tensor.shape[0] == each else each * rank
            slots.append(SlotTensor(name, tensor, first))
    return LayerTensors(tuple(moved), tuple(slots), tuple(sorted(factors, key=lambda one: one[0])))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """The same for a parameter and for another view of all of it."""
    return tensor.data_ptr(), tensor.nbytes


def _direct(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and other tensors of a module itself."""
    for named in (module._parameters, module._buffers, vars(module)):
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                yield name, value
