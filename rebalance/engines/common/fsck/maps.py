"""The check of an engine's maps on the device: each names what the placement says.

Kernels choose slots by these tensors, and nothing reads them back: a wrong entry sends tokens to
another expert until the next map is committed.

Shapes:  S slots of all ranks, E experts, X entries of a list.
"""

from __future__ import annotations

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
