"""The tensors of a layer's experts: those that an engine moves, and what it derived from them.

Shapes:  C slots of this rank, S slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rebalance.engines.common.fsck.maps import DeviceMaps
from rebalance.engines.common.tap import IntArray

LANE_BYTES = 4
# Of tensors that an engine does not move. Whole numbers are maps and counters, not weights.
WHOLE = (torch.int16, torch.int32, torch.int64, torch.bool)

Moved = Sequence[torch.Tensor]  # [C, ...] what an engine moves of a layer, in its order
Named = tuple[str, torch.Tensor]
Factor = Named  # one number for all experts of the rank


@dataclass(frozen=True, eq=False)
class SlotTensor:
    """A tensor with a row for each slot."""

    name: str
    tensor: torch.Tensor  # [C, ...], or [S, ...]
    first: int  # row of this rank's first slot

    def record(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot of this rank, 0..C-1."""
        return as_bytes(self.tensor[self.first + slot])


class EngineView:
    """Where an engine has its experts, as one rank sees them.

    Args:
        rows: layers with routed experts, by the engine's numbers.
        layer: returns a module with all tensors of a layer, and what the engine moves of it, as
            they are now: a reload may replace them.
        held: returns [S] experts by slot of a layer, by the map that serves.
        rank: of this process.
        num_ranks: that have slots.
        read: returns further tensors that kernels read, such as those of a quantisation method's
            object, which no module owns.
        maps: returns the tensors by which kernels choose slots; None: they are not compared.
    """

    def __init__(
        self,
        rows: Iterable[int],
        layer: Callable[[int], tuple[torch.nn.Module, Moved]],
        held: Callable[[int], IntArray],
        rank: int,
        num_ranks: int,
        read: Callable[[int], Iterable[Named]] = lambda row: (),
        maps: Callable[[int], DeviceMaps] | None = None,
    ) -> None:
        self.rows, self.layer, self.held = list(rows), layer, held
        self.read, self.maps = read, maps
        self.rank, self.num_ranks = rank, num_ranks
        self.num_own = len(layer(self.rows[0])[1][0]) if self.rows else 0  # slots of this rank
        self.owners = {row: _owners_of(*layer(row)) for row in self.rows}

    def slot(self, place: int) -> int:
        """The number among the slots of all ranks of a slot of this rank."""
        return self.rank * self.num_own + place

    def moved(self, row: int) -> Moved:
        """What the engine moves of a layer on this rank."""
        return self.layer(row)[1]

    def tensors(self, row: int) -> tuple[list[SlotTensor], list[Factor]]:
        """The tensors that the engine moves, and further ones of the modules that own them.

        Modules are looked up by name, since a reload may make new ones.
        """
        model, moved = self.layer(row)
        named = {_place(tensor): (name, tensor) for name, tensor in self.read(row)}
        named |= {
            _place(tensor): (name, tensor)
            for owner in self.owners[row]
            for name, tensor in direct(model.get_submodule(owner))
        }
        slots = [
            SlotTensor(named.pop(_place(tensor), (f"weight {number}",))[0], tensor, 0)
            for number, tensor in enumerate(moved)
        ]
        factors = []
        for name, tensor in named.values():
            if tensor.dtype in WHOLE or tensor.device.type == "meta" or is_of_router(name, tensor):
                continue
            if tensor.numel() == 1:
                factors.append((name, tensor))
            elif tensor.dim() and tensor.shape[0] == self.num_own:
                slots.append(SlotTensor(name, tensor, 0))
            elif tensor.dim() and tensor.shape[0] == self.num_own * self.num_ranks:
                slots.append(SlotTensor(name, tensor, self.slot(0)))
        return slots, sorted(factors, key=lambda one: one[0])


def is_of_router(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor has one number for each expert, which routing reads.

    Without redundant experts it has as many rows as there are slots, and it stays in place when
    experts move. The biases of experts themselves have a row of numbers for each slot.
    """
    return tensor.dim() == 1 and ("bias" in name or name == "per_expert_scale")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order, and zeros up to a whole digest lane.

    A copy where the tensor is not contiguous, or has such zeros.
    """
    found = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = -found.numel() % LANE_BYTES
    return torch.nn.functional.pad(found, (0, rest)) if rest else found


def _owners_of(model: torch.nn.Module, moved: Moved) -> list[str]:
    """Names of the modules that hold one of these tensors, or a view of it."""
    known = {tensor.untyped_storage().data_ptr() for tensor in moved}
    return [
        name
        for name, module in model.named_modules()
        if any(tensor.untyped_storage().data_ptr() in known for _, tensor in direct(module))
    ]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """The same for a parameter and for another view of all of it."""
    return tensor.data_ptr(), tensor.nbytes


def direct(owner: object) -> Iterator[Named]:
    """Parameters, buffers and other tensors of a module, or of any object, itself."""
    tables = (getattr(owner, "_parameters", {}), getattr(owner, "_buffers", {}), vars(owner))
    for named in tables:
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                yield name, value
