"""The tensors of a layer's experts: those that an engine moves, and what it derived from them.

``DeviceMaps`` checks that an engine's maps on the device name what the placement says. Kernels
choose slots by these tensors, and nothing reads them back: a wrong entry sends tokens to another
expert until the next map is committed.

Shapes:  C slots of this rank, S slots of all ranks, E experts, X entries of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rebalance.engines.common.fsck.report import Fault
from rebalance.engines.common.tap import IntArray, on_host


@dataclass(frozen=True, eq=False)
class DeviceMaps:
    """The tensors by which kernels choose slots in a layer, and what they should say."""

    held: torch.Tensor  # [S] experts by slot
    lists: torch.Tensor  # [E, X] slots of each expert
    counts: torch.Tensor  # [E] entries of each list that are used
    times: IntArray  # [S] how often each slot stands in the list of its expert


class LookedMaps:
    """Maps of a layer whose comparison may be on its way from the device.

    Args:
        row: layer.
        held: [S] experts by slot of the placement.
        maps: of the engine.
    """

    def __init__(self, row: int, held: IntArray, maps: DeviceMaps) -> None:
        self._row, self._held, self._times = row, held.copy(), maps.times.copy()
        device, (num_experts, width) = maps.lists.device, maps.lists.shape
        expected = torch.from_numpy(self._held).to(device)
        lists, places = maps.lists.long(), torch.arange(width, device=device)
        used, slots = places < maps.counts[:, None], lists.clamp(0, len(held) - 1)
        of_expert = torch.arange(num_experts, device=device)[:, None]
        strays = used & ((lists != slots) | (expected[slots] != of_expert))
        times = torch.zeros(len(held), dtype=torch.int64, device=device)
        times.scatter_add_(0, slots.flatten(), (used & ~strays).flatten().long())
        # In one tensor: one copy to the host.
        self._found = on_host(torch.cat((maps.held.long(), times, strays.sum(dim=1))))

    def is_complete(self) -> bool:
        """Whether the comparison has arrived."""
        return self._found[1] is None or bool(self._found[1].query())

    def faults(self, held: IntArray, times: IntArray) -> list[Fault]:
        """What was wrong; nothing of a map that was replaced meanwhile.

        Args:
            held: [S] the placement now.
            times: [S] the same as in ``DeviceMaps``.
        """
        if not (np.array_equal(held, self._held) and np.array_equal(times, self._times)):
            return []
        named, listed, strays = np.split(self._found[0].numpy(), [len(held), 2 * len(held)])
        faults = [
            Fault(
                "map",
                self._row,
                "the device's map",
                f"names expert {named[slot]}, expected the expert of the placement",
                int(slot),
                int(held[slot]),
            )
            for slot in np.flatnonzero(named != held)
        ]
        faults += [
            Fault(
                "list",
                self._row,
                "the device's replica list",
                f"names {strays[expert]} slots that do not hold the expert, expected none",
                expert=int(expert),
            )
            for expert in np.flatnonzero(strays)
        ]
        return faults + [
            Fault(
                "list",
                self._row,
                "the device's replica list",
                f"names the slot {listed[slot]} times, expected {times[slot]}",
                int(slot),
                int(held[slot]),
            )
            for slot in np.flatnonzero(listed != times)
        ]


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
