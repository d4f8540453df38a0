"""Routing table: from experts to slots, and the choice among an expert's replicas.

The table's tensors keep their addresses and shapes for ever and are changed by copies between
steps, so a captured graph that reads them stays valid through every swap.

Shapes:  L MoE layers, E experts, Rmax most replicas of an expert, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.placement import EMPTY, Placement
from eplb.errors import PlacementError
from runtime.draws import choose_by_draw
from runtime.streams import Completion

SHARE_ONE = 2**16  # cumulative shares are fixed-point: SHARE_ONE stands for 1.0
# Runs of adjacent layers that are copied one by one. Each is a launch, which takes a GPU far longer
# than the copy itself (64 kB for a layer of 256 experts x 32 replicas), so few of them.
MOST_COPIES = 2


@dataclass(frozen=True)
class TableLayers:
    """Entries of some layers, ready to be copied into a routing table."""

    layers: torch.Tensor  # [n], ascending
    runs: tuple[tuple[int, int], ...]  # the same as half-open ranges of adjacent layers
    entries: torch.Tensor  # [n, 2, E, Rmax] as ``RoutingTable`` lays them out
    generation: int


class RoutingTable:
    """Slots and cumulative shares of every expert, as this rank routes to them.

    A layer is one run of words, its slots beside its shares: adjacent layers are one run of bytes,
    and all layers change in a single copy.

    The last replica's cumulative share is SHARE_ONE exactly, so that no draw can fall past it: a
    draw that found no replica would be dropped in silence by a dispatcher.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        max_replicas: int,
        source_node: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        """
        Args:
            placement: the first one that serves.
            max_replicas: Rmax of all placements to come.
            source_node: the node whose shares are read, where shares depend on it.
            device: where the tensors lie.
        """
        shape = (placement.num_layers, 2, placement.num_experts, max_replicas)
        self._entries = torch.zeros(shape, dtype=torch.int32, device=device)
        # [L, E, Rmax] each, padded with EMPTY and with SHARE_ONE; contiguous within a layer
        self.slots, self.cumulative = self._entries.unbind(1)
        # Number of ids from E on, which name no expert and were dropped like padding.
        self.strays = torch.zeros(1, dtype=torch.int32, device=device)
        self.device = self.strays.device
        self.source_node = source_node
        self.generation = placement.generation
        self.load(placement, range(placement.num_layers))

    def load(self, placement: Placement, layers: Iterable[int]) -> None:
        """Apply some layers of a placement. Only between steps.

        Raises:
            PlacementError: an expert has more replicas than the table has room for.
        """
        self.swap(self.prepare(placement, layers))

    def prepare(self, placement: Placement, layers: Iterable[int]) -> TableLayers:
        """Work out the entries of some layers, ahead of the step at which they are to serve.

        Raises:
            PlacementError: an expert has more replicas than the table has room for.
        """
        chosen = sorted(layers)
        slots, cumulative = _lookup(placement, self.source_node)
        room, found = self.slots.shape[2], slots.shape[2]
        if found > room:
            raise PlacementError(
                f"an expert has {found} replicas, expected at most {room}, the table's size"
            )
        entries = torch.full((len(chosen), *self._entries.shape[1:]), EMPTY, dtype=torch.int32)
        entries[:, 1] = SHARE_ONE  # entries that name no replica
        entries[:, 0, :, :found] = torch.from_numpy(slots[chosen])
        entries[:, 1, :, :found] = torch.from_numpy(cumulative[chosen])
        device = self._entries.device
        prepared = TableLayers(
            torch.tensor(chosen, dtype=torch.int64).to(device),
            _runs(chosen),
            entries.to(device),
            placement.generation,
        )
        # Made on another thread's stream than the one that will read it.
        Completion(is_cuda=self.slots.is_cuda).wait()
        return prepared

    def swap(self, prepared: TableLayers) -> None:
        """Apply prepared layers: few copies that neither allocate nor wait. Between steps.

        Adjacent layers are one plain copy, which a GPU makes at the speed of its memory. Layers
        that lie apart in too many runs are one scattered copy instead.
        """
        if len(prepared.runs) > MOST_COPIES:
            self._entries.index_copy_(0, prepared.layers, prepared.entries)
        else:
            first = 0
            for start, end in prepared.runs:
                last = first + end - start
                self._entries[start:end].copy_(prepared.entries[first:last])
                first = last
        self.generation = prepared.generation

    def draw(self, layer: int, experts: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """Pick a replica for every (token, expert) pair by a random draw against its shares.

        Even in expectation only, but one small kernel on a GPU. Deterministic for a seed.

        Args:
            layer: the MoE layer, 0..L-1.
            experts: [T, K] expert ids; negative for padding.
            seed: [1] int64 on the table's device, which a CUDA graph reads anew at each replay.

        Returns:
            [T, K] int64 slots, EMPTY for padding. An id that is no expert's is EMPTY too and is
            counted in ``strays``.
        """
        if not self.slots.is_cuda:
            experts = self._without_strays(experts)
            return choose_by_draw(self.slots[layer], self.cumulative[layer], experts, seed)
        from runtime.kernels.replicas import choose_replicas

        chosen = torch.empty_like(experts)
        choose_replicas(
            self.slots[layer], self.cumulative[layer], experts, seed, chosen, self.strays
        )
        return chosen

    def choose(
        self, layer: int, experts: torch.Tensor, *, salt: int | torch.Tensor
    ) -> torch.Tensor:
        """Pick a replica for every (token, expert) pair, by share; exactly even.

        Systematic sampling: the n tokens of an expert are laid at even distances over its shares,
        from a start that the salt decides. Each replica gets its share of n to within one token,
        and ranks with other salts do not favour the same replica.

        Args:
            layer: the MoE layer, 0..L-1.
            experts: [T, K] expert ids; negative for padding.
            salt: any integer, or a tensor [1] that a CUDA graph reads anew at each replay; alike on
                ranks that must choose alike.

        Returns:
            [T, K] int64 slots, EMPTY for padding. An id that is no expert's is EMPTY too and is
            counted in ``strays``.
        """
        flat = self._without_strays(experts).flatten()
        used = flat.clamp(min=0)
        nth, count = position_among_equals(flat)
        start = _hash(used + self.slots.shape[1] * (layer + 1), salt)
        draw = (nth * SHARE_ONE + start % SHARE_ONE) // count  # in 0..SHARE_ONE - 1
        draw = draw.clamp(max=SHARE_ONE - 1)
        replica = (draw[:, None] >= self.cumulative[layer][used]).sum(dim=1)
        slot = self.slots[layer][used, replica].to(torch.int64)
        slot.masked_fill_(flat < 0, EMPTY)
        return slot.view_as(experts)

    def _without_strays(self, experts: torch.Tensor) -> torch.Tensor:
        is_stray = experts >= self.slots.shape[1]
        self.strays += is_stray.sum()
        return experts.masked_fill(is_stray, EMPTY)


def _runs(layers: list[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of adjacent layers, of layers in ascending order."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return tuple(runs)


def _lookup(placement: Placement, source_node: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    slots = placement.expert_to_slots
    share = placement.slot_share
    if placement.source_share is not None:
        share = placement.source_share[source_node]
    layer = np.arange(placement.num_layers)[:, None, None]
    per_replica = np.where(slots == EMPTY, 0.0, share[layer, np.maximum(slots, 0)])
    cumulative = np.rint(np.cumsum(per_replica, axis=2) * SHARE_ONE).astype(np.int32)
    last = placement.replica_count - 1
    at_or_past_last = np.arange(slots.shape[2]) >= last[:, :, None]
    cumulative[at_or_past_last] = SHARE_ONE
    return slots, cumulative


def position_among_equals(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each entry: how many equal ones stand before it, and how many there are in all.

    Shapes depend on nothing but the input's, so that a CUDA graph can hold it.
    """
    in_order, order = torch.sort(ids, stable=True)
    first = torch.searchsorted(in_order, in_order)
    past_last = torch.searchsorted(in_order, in_order, right=True)
    nth = torch.empty_like(ids)
    count = torch.empty_like(ids)
    nth[order] = torch.arange(len(ids), device=ids.device) - first
    count[order] = past_last - first
    return nth, count


def _hash(values: torch.Tensor, salt: int | torch.Tensor) -> torch.Tensor:
    """Mix integers and a salt into evenly spread non-negative 31-bit figures."""
    # Multiply-and-fold with odd constants; every step stays below 2**63 in int64.
    mixed = (values * 0x9E3779B1 + (salt & 0x7FFFFFFF) * 0x85EBCA6B) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return mixed ^ (mixed >> 15)
