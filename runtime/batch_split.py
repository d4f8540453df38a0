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

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY
from eplb.errors import ConfigError
from eplb.shares.batch import PLANNED, ROUNDS, SplitLayout, rank_load_of, split_batch
from runtime.routing import SHARE_ONE, RoutingTable, position_among_equals

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
        self._table, self._exchange, self.source = table, exchange, source
        self._rounds = rounds
        num_experts, device = table.slots.shape[1], table.slots.device
        int32 = torch.int32
        self._counts = torch.zeros(num_experts, dtype=int32, device=device)
        self.gathered = torch.zeros((num_sources, num_experts), dtype=int32, device=device)
        self._starts, self.totals = (torch.zeros_like(self._counts) for _ in range(2))
        # [R] tokens of each rank after the split; on a host alone.
        self.rank_load = torch.zeros(table.split["fed_by"].shape[1], dtype=torch.float32)
        self.up_to = torch.zeros(table.split["rank"].shape[1:], dtype=int32, device=device)
        if device.type == "cuda":
            from runtime.kernels import batch_split

            self._kernels = batch_split
            blocks = (batch_split.num_blocks(max_pairs, 1), num_experts)
            self._blocks = torch.zeros(blocks, dtype=int32, device=device)
            self.layers = [
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
        self._exchange(self._counts, self.gathered)
        self.split(layer, self.gathered)
        return self.choose(layer, experts)

    def count(self, experts: torch.Tensor) -> None:
        """First part on a device: this source's counts, which are exchanged next."""
        self._kernels.count_experts(experts, self._blocks, self._counts)

    def split(self, layer: int, gathered: torch.Tensor) -> None:
        """Second part on a device: where each replica's tokens end, in ``up_to``."""
        self._kernels.split_batch(
            self.layers[layer],
            gathered,
            self.source,
            self._starts,
            self.totals,
            self.up_to,
            rounds=self._rounds,
        )

    def choose(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Third part on a device: the slots."""
        chosen, table = torch.empty_like(experts), self._table
        self._kernels.choose_by_split(
            self.layers[layer],
            table.slots[layer],
            table.cumulative[layer],
            experts,
            self._blocks,
            self._starts,
            self.totals,
            self.up_to,
            self._counts,
            chosen,
            table.strays,
        )
        return chosen

    def _on_host(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        table = self._table
        num_experts = table.slots.shape[1]
        flat = experts.flatten()
        is_expert = (flat >= 0) & (flat < num_experts)
        table.strays += (flat >= num_experts).sum()
        found = torch.bincount(flat[is_expert], minlength=num_experts)
        self._counts.copy_(found)
        self._exchange(self._counts, self.gathered)
        totals = self.gathered.sum(dim=0)
        starts = self.gathered[: self.source].sum(dim=0)
        layout = SplitLayout(
            **{name: one[layer].numpy() for name, one in table.split.items() if name != "num_turns"}
        )
        split = split_batch(totals.numpy(), layout, rounds=self._rounds)
        self.rank_load.copy_(torch.from_numpy(rank_load_of(totals.numpy(), layout, split)))
        used = torch.where(is_expert, flat, 0)
        nth, _ = position_among_equals(torch.where(is_expert, flat, EMPTY))
        position = starts[used] + nth
        row = torch.from_numpy(layout.row.astype(np.int64))[used]
        size = (layout.rank >= 0).sum(axis=1)
        ends = np.floor(np.cumsum(split, axis=1) + 0.5)
        ends[np.arange(ends.shape[1]) + 1 >= size[:, None]] = np.inf
        way = (torch.from_numpy(ends)[row.clamp(min=0)] <= position[:, None]).sum(dim=1)
        slot = torch.from_numpy(layout.slot)[row.clamp(min=0), way.clamp(max=ends.shape[1] - 1)]
        draw = (position * SHARE_ONE // totals[used].clamp(min=1)).clamp(max=SHARE_ONE - 1)
        replica = (draw[:, None] >= table.cumulative[layer][used]).sum(dim=1)
        planned = table.slots[layer][used, torch.where(row == PLANNED, replica, 0)]
        chosen = torch.where(row >= 0, slot, planned).to(torch.int64)
        return chosen.masked_fill_(~is_expert, EMPTY).view_as(experts)
