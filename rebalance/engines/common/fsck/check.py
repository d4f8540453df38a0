"""The check of live slots against digests that all ranks agreed on at the start.

Digests of every expert's tensors are taken after the weights were loaded and before anything moved,
while map and weights are known to match: from then on a slot is right if it has its expert's
digests, wherever the expert is. Replicas that differ already at that time, and factors that differ
between ranks, are faults of loading. Later the check looks at one live slot now and then, within a
part of the time, and never waits for a device.

What is checked are the tensors of a layer's experts, those that an engine moves and what it derived
from them, and its maps on the device (``DeviceMaps``). Kernels choose slots by the maps, and
nothing reads them back: a wrong entry sends tokens to another expert until the next map is
committed.

Shapes:  C slots of this rank, S slots of all ranks, E experts, X entries of a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from rebalance.engines.common.fsck.report import Fault
from rebalance.engines.common.records import NOBODY
from rebalance.engines.common.tap import IntArray, on_host
from rebalance.types import Digest
from runtime.memory import PendingDigests, RecordDigests, digest


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


PART = 0.001  # of the time that the check may take
BYTES_PER_S = 2e12  # at which a device reads a record; the host does not see that time
BUSY = 2.0  # times what an idle pass has saved, from which a busy pass is used too

# By layer and tensor: the digest of each expert's, or that of a factor as of ``NOBODY``.
References = dict[tuple[int, str], dict[int, Digest]]


def digests_of(view: EngineView) -> list[Any]:
    """For each layer: digests of each tensor by slot of this rank, and of each factor; for JSON."""
    own = []
    for row in view.rows:
        tensors, factors = view.tensors(row)
        slots = {
            one.name: [digest(one.record(place)) for place in range(view.num_own)]
            for one in tensors
        }
        own.append((slots, {name: digest(as_bytes(tensor)) for name, tensor in factors}))
    return own


def agreed(view: EngineView, by_rank: list[list[Any]]) -> tuple[References, list[Fault]]:
    """References from the digests of all ranks, and what differs between them.

    An expert's tensor whose replicas differ has no reference, and is not checked later.
    """
    references: References = {}
    faults = []
    for place, row in enumerate(view.rows):
        ranks = [own[place] for own in by_rank]
        names = [sorted({*slots, *factors}) for slots, factors in ranks]
        faults += [
            Fault("tensors", row, f"rank {rank}", f"has {found}, expected {names[0]}")
            for rank, found in enumerate(names)
            if found != names[0]
        ]
        slots_of_first, factors_of_first = ranks[0]
        for name in slots_of_first:
            # A rank without this tensor has no digests.
            slots = [found.get(name, [None] * view.num_own) for found, _ in ranks]
            of_slots = list(chain.from_iterable(slots))
            references[row, name], differing = _of_slots(row, name, view.held(row), of_slots)
            faults += differing
        for name, first in factors_of_first.items():
            odd = [rank for rank, (_, found) in enumerate(ranks) if found.get(name, first) != first]
            if not odd:
                references[row, name] = {NOBODY: _digest(first)}
                continue
            what = (
                f"has another value on ranks {odd} than on rank 0, expected one on all: an "
                "expert that moves there is computed with another factor"
            )
            faults.append(Fault("factor", row, name, what))
    return references, faults


def _of_slots(
    row: int, name: str, held: IntArray, digests: list[Any]
) -> tuple[dict[int, Digest], list[Fault]]:
    """Digests of experts from those of all slots [S], and replicas that differ."""
    first: dict[int, int] = {}  # slot of each expert
    faults = []
    for slot, (expert, found) in enumerate(zip(held.tolist(), digests, strict=True)):
        if found is not None and found != digests[first.setdefault(expert, slot)]:
            what = f"differs from the replica in slot {first[expert]}, expected the same bytes"
            faults.append(Fault("replicas", row, name, what, slot, expert))
    differing = {fault.expert for fault in faults}
    return {
        expert: _digest(digests[slot]) for expert, slot in first.items() if expert not in differing
    }, faults


def _digest(found: list[int]) -> Digest:
    plain, weighted = found  # JSON has made a list of it
    return plain, weighted


@dataclass(frozen=True, eq=False)
class _Looked:
    """A slot of this rank whose digests, and those of its layer's factors, may be on their way."""

    row: int
    slot: int
    digests: list[tuple[str, int, PendingDigests]]  # tensor, and its expert or NOBODY
    maps: LookedMaps | None  # the layer's device maps; only with its first slot

    def is_complete(self) -> bool:
        """Whether all of it has arrived from the device."""
        pending = (pending.is_complete() for _, _, pending in self.digests)
        return all(pending) and (self.maps is None or self.maps.is_complete())


class PlacementCheck:
    """Goes round this rank's live slots. The thread that runs passes uses it, between passes.

    Args:
        view: the engine's tensors and map.
        references: agreed by all ranks.
        clock: seconds.
        part: of the time between visits that they may take.
    """

    def __init__(
        self,
        view: EngineView,
        references: References,
        clock: Callable[[], float],
        part: float,
    ) -> None:
        self._view, self._references, self._clock, self._part = view, references, clock, part
        self._digests = RecordDigests()
        self._looked: _Looked | None = None
        self._first: deque[tuple[int, int]] = deque()  # layers and slots before the next one
        self._place = 0
        self._since, self._cost_s = clock(), 0.0
        self.num_slots = len(view.rows) * view.num_own  # slots of this rank in all layers
        self.num_checked = 0  # slots
        self.num_rounds = 0  # checks of all slots of this rank
        # What the last judgement found right: kind of a fault, layer, slot and tensor.
        self.right: list[tuple[str, int, int, str]] = []

    def prepare(self) -> None:
        """Make a look that nobody judges, before the engine serves; its time does not count.

        The first look at a GPU compiles a kernel for each size of a tensor. As the cost of a look,
        these seconds would keep the next one away for a thousand times as long.
        """
        self._look()
        self._place = self.num_rounds = 0
        self._digests = RecordDigests()  # passes may run on another stream than this one
        self._since = self._clock()

    def visit(self, *, is_idle: bool) -> list[Fault]:
        """Judge the slot that was looked at, or look at the next one, if there is time for it."""
        self.right = []
        begin = self._clock()
        need = self._cost_s * (1.0 if is_idle else BUSY) / self._part
        if not self.num_slots or begin - self._since < need:
            return []
        faults: list[Fault] = []
        device_s = 0.0
        if self._looked is None:
            self._looked = self._look()
            records = [pending.records[0] for _, _, pending in self._looked.digests]
            device_s = sum(one.numel() for one in records if one.is_cuda) / BYTES_PER_S
        elif self._looked.is_complete():
            faults = self._judged(self._looked)
            self._looked = None
        self._since = self._clock()
        self._cost_s = self._since - begin + device_s
        return faults

    def look_first(self, layer: int, place: int) -> None:
        """Look at a slot before all others.

        Args:
            layer: position among the layers of the view.
            place: the slot of this rank, 0..C-1.
        """
        self._first.append((layer, place))

    def forget_look(self) -> None:
        """Look again at a slot that was looked at: slots have other bytes by now."""
        if (looked := self._looked) is not None:
            self._first.appendleft((self._view.rows.index(looked.row), looked.slot))
            self._looked = None

    def _look(self) -> _Looked:
        view = self._view
        if self._first:
            layer, slot = self._first.popleft()
        else:
            layer, slot = divmod(self._place, view.num_own)
            self._place = (self._place + 1) % self.num_slots
            self.num_rounds += self._place == 0
        row = view.rows[layer]
        expert = int(view.held(row)[view.slot(slot)])
        tensors, factors = view.tensors(row)
        found = [(one.name, expert, self._order(one.record(slot))) for one in tensors]
        found += [(name, NOBODY, self._order(as_bytes(tensor))) for name, tensor in factors]
        maps = None
        if view.maps is not None and not slot:
            maps = LookedMaps(row, view.held(row), view.maps(row))
        return _Looked(row, slot, found, maps)

    def _order(self, record: torch.Tensor) -> PendingDigests:
        return self._digests.order([record], [])

    def _judged(self, looked: _Looked) -> list[Fault]:
        row, slot = looked.row, self._view.slot(looked.slot)
        held = int(self._view.held(row)[slot])
        self.num_checked += 1
        faults = []
        for name, expert, pending in looked.digests:
            (found,) = self._digests.read(pending)
            known = self._references.get((row, name), {})
            if expert in known and known[expert] == found:
                is_factor = expert == NOBODY
                if is_factor or held == expert:
                    one = ("factor", row, -1, name) if is_factor else ("slot", row, slot, name)
                    self.right.append(one)
            if known.get(expert) in (None, found):
                continue
            if expert == NOBODY:
                what = f"of rank {self._view.rank} has changed since all ranks agreed on it"
                faults.append(Fault("factor", row, name, what))
            elif held == expert:  # else it moved meanwhile
                other = next((other for other, one in known.items() if one == found), None)
                whose = "of no expert" if other is None else f"of expert {other}"
                what = f"has the bytes {whose}, expected those of the expert that the map names"
                faults.append(Fault("slot", row, name, what, slot, expert))
        if looked.maps is not None and self._view.maps is not None:
            faults += looked.maps.faults(self._view.held(row), self._view.maps(row).times)
        return faults
