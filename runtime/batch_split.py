"""Replicas chosen by the batch's own counts, between the router and the dispatch.

    router -> count -> all-gather of counts [E] -> split -> slots -> dispatch

A plan from history knows the experts' mean load, and a batch differs from it. The replicas that the
placement has are split anew for each batch and layer, by the counts of all ranks. No weight moves.

Every rank splits by what it gathered. Were the counts of two ranks to differ, tokens would still go
to replicas of their expert: the balance suffers, the output does not.

Shapes:  E experts, N sources (ranks that route), T tokens, K top-k, M experts that are split,
         W ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY
from eplb.errors import ConfigError
from eplb.shares.batch import PLANNED, ROUNDS, SplitLayout, split_batch
from runtime.routing import SHARE_ONE, RoutingTable, position_among_equals

if TYPE_CHECKING:
    from runtime.kernels.batch_split import LayerSplit

NO_END = 2**31 - 1  # of the last way: no position is past it
Exchange = Callable[[torch.Tensor, torch.Tensor], None]  # own counts [E] -> gathered [N, E]


def all_gather_counts(group: dist.ProcessGroup) -> Exchange:
    """The exchange over a process group: an all-gather, which a CUDA graph can hold with NCCL."""

    # Its name in torch from 2.13 on, where the other is deprecated.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
        gather(gathered.view(-1), counts, group=group)

    return exchange


class BatchSplit:
    """Chooses the slot of every token by the counts of the batch.

    Buffers have fixed addresses and shapes, for CUDA graphs.

    Raises:
        ConfigError: the table was made without a topology.
    """

    def __init__(
        self,
        table: RoutingTable,
        exchange: Exchange,
        *,
        source: int,
        num_sources: int,
        max_pairs: int,
        rounds: int = ROUNDS,
    ) -> None:
        """
        Args:
            table: of this rank, made with a topology.
            exchange: gathers the counts of all sources.
            source: this rank among them.
            num_sources: N.
            max_pairs: most tokens times top-k of a batch.
            rounds: of the waterfill.
        """
        if not table.split:
            raise ConfigError("the routing table has no topology, expected one to split batches")
        self.table, self._exchange, self._source = table, exchange, source
        self._rounds = rounds
        num_experts, device = table.slots.shape[1], table.slots.device
        int32 = torch.int32
        self._counts = torch.zeros(num_experts, dtype=int32, device=device)
        self._gathered = torch.zeros((num_sources, num_experts), dtype=int32, device=device)
        self.starts, self.totals = (torch.zeros_like(self._counts) for _ in range(2))
        self.up_to = torch.zeros(table.split["rank"].shape[1:], dtype=int32, device=device)
        if device.type == "cuda":
            from runtime.kernels import batch_split

            self._kernels = batch_split
            blocks = (batch_split.num_blocks(max_pairs, 1), num_experts)
            self.blocks = torch.zeros(blocks, dtype=int32, device=device)
            self._layers = [
                batch_split.LayerSplit(**{name: one[layer] for name, one in table.split.items()})
                for layer in range(len(table.slots))
            ]

    def slots(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Slots [T, K] for experts [T, K]; EMPTY for padding.

        Every source calls it for the same layers in the same order, as a dispatch. An id that is no
        expert's is EMPTY and counted in ``RoutingTable.strays``.
        """
        if experts.is_cuda:
            return self._on_device(layer, experts)
        return self._on_host(layer, experts)

    def _on_device(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        self.count(experts)
        self._exchange(self._counts, self._gathered)
        self.split(layer, self._gathered)
        return self.choose(layer, experts)

    def count(self, experts: torch.Tensor) -> None:
        """First part on a device: this source's counts, which are exchanged next."""
        self._kernels.count_experts(experts, self.blocks, self._counts)

    def split(self, layer: int, gathered: torch.Tensor) -> None:
        """Second part on a device: where each replica's tokens end, in ``up_to``."""
        self._kernels.split_batch(
            self._layers[layer],
            gathered,
            self._source,
            self.starts,
            self.totals,
            self.up_to,
            rounds=self._rounds,
        )

    def choose(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Third part on a device: the slots."""
        chosen, table = torch.empty_like(experts), self.table
        self._kernels.choose_by_split(
            self._layers[layer],
            table.slots[layer],
            table.cumulative[layer],
            experts,
            self.blocks,
            self.starts,
            self.totals,
            self.up_to,
            self._counts,
            chosen,
            table.strays,
        )
        return chosen

    def layer_split(self, layer: int) -> LayerSplit:
        """Of a layer as the table has it, on a device."""
        return self._layers[layer]

    def layout(self, layer: int) -> SplitLayout:
        """Of a layer as the table has it now, on a CPU."""
        named = {name: one[layer].numpy() for name, one in self.table.split.items()}
        return SplitLayout(**{name: one for name, one in named.items() if name != "num_turns"})

    def positions(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, K] numbers of the tokens among all sources' tokens of their expert, on a CPU."""
        is_expert = (experts >= 0) & (experts < len(self.totals))
        used = torch.where(is_expert, experts, 0)
        nth, _ = position_among_equals(torch.where(is_expert, experts, EMPTY).flatten())
        return self.starts.to(torch.int64)[used] + nth.view_as(experts)

    def _on_host(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        table = self.table
        num_experts = table.slots.shape[1]
        flat = experts.flatten()
        is_expert = (flat >= 0) & (flat < num_experts)
        table.strays += (flat >= num_experts).sum()
        found = torch.bincount(flat[is_expert], minlength=num_experts)
        self._counts.copy_(found)
        self._exchange(self._counts, self._gathered)
        self.totals.copy_(self._gathered.sum(dim=0))
        self.starts.copy_(self._gathered[: self._source].sum(dim=0))
        layout, totals = self.layout(layer), self.totals.to(torch.int64)
        split = split_batch(totals.numpy(), layout, rounds=self._rounds)
        used = torch.where(is_expert, flat, 0)
        position = self.positions(experts).flatten()
        row = torch.from_numpy(layout.row.astype(np.int64))[used]
        size = (layout.rank >= 0).sum(axis=1)
        ends = np.floor(np.cumsum(split, axis=1) + 0.5)
        ends[np.arange(ends.shape[1]) + 1 >= size[:, None]] = NO_END
        self.up_to.copy_(torch.from_numpy(ends))
        way = (torch.from_numpy(ends)[row.clamp(min=0)] <= position[:, None]).sum(dim=1)
        slot = torch.from_numpy(layout.slot)[row.clamp(min=0), way.clamp(max=ends.shape[1] - 1)]
        draw = (position * SHARE_ONE // totals[used].clamp(min=1)).clamp(max=SHARE_ONE - 1)
        replica = (draw[:, None] >= table.cumulative[layer][used]).sum(dim=1)
        planned = table.slots[layer][used, torch.where(row == PLANNED, replica, 0)]
        chosen = torch.where(row >= 0, slot, planned).to(torch.int64)
        return chosen.masked_fill_(~is_expert, EMPTY).view_as(experts)
