"""Replicas chosen by the batch's own counts, between the router and the dispatch.

    router -> count -> exchange of counts [E] -> split -> slots -> dispatch

A plan from history knows the experts' mean load, and a batch differs from it. The replicas that the
placement has are split anew for each batch and layer, by the counts of all ranks. No weight moves.

Every rank splits by what it gathered. Were the counts of two ranks to differ, tokens would still go
to replicas of their expert: the balance suffers, the output does not.

Shapes:  L MoE layers, E experts, N sources (ranks that route), T tokens, K top-k, R ranks,
         M experts that are split, W ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY
from eplb.errors import ConfigError
from runtime.batch.split import PLANNED, SplitLayout, SplitRule, SplitSwitch, split_batch
from runtime.peer_counts import PeerCounts
from runtime.routing import SHARE_ONE, RoutingTable, position_among_equals
from runtime.streams import Completion

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

    Buffers have fixed addresses and shapes, for CUDA graphs. A layer whose batches gain too little
    follows the planned shares for a while: ``SplitSwitch``. Of an eager pass it is left out then,
    with its exchange; of a captured one its rounds are.

    Raises:
        ConfigError: the table was made without a topology, or peers exchange counts on a CPU.
    """

    def __init__(
        self,
        table: RoutingTable,
        exchange: Exchange | PeerCounts,
        *,
        source: int,
        num_sources: int,
        max_pairs: int,
        rule: SplitRule | None = None,
    ) -> None:
        """
        Args:
            table: of this rank, made with a topology.
            exchange: gathers the counts of all sources.
            source: this rank among them.
            num_sources: N.
            max_pairs: most tokens times top-k of a batch.
            rule: alike on all ranks; None: the default one.
        """
        if not table.split:
            raise ConfigError("the routing table has no topology, expected one to split batches")
        self.table, self._exchange, self.source = table, exchange, source
        self._rule = rule or SplitRule()
        num_layers, num_experts = table.slots.shape[:2]
        device, int32 = table.slots.device, torch.int32
        self._counts = torch.zeros(num_experts, dtype=int32, device=device)
        self.gathered = torch.zeros((num_sources, num_experts), dtype=int32, device=device)
        self._switches = [SplitSwitch()] * num_layers
        self._num_slots = table.split["fed_by"][0].numel()
        if device.type != "cuda":
            if isinstance(exchange, PeerCounts):
                raise ConfigError("found peer memory on a CPU, expected an exchange over a group")
            # What a batch leaves, as ``BatchTensors`` on a device.
            self.totals, self.starts = (torch.zeros_like(self._counts) for _ in range(2))
            self.up_to = torch.zeros(table.split["rank"].shape[1:], dtype=int32)
            self.rank_load = torch.zeros(table.split["fed_by"].shape[1])
            return
        from runtime.kernels import batch_counts, batch_split

        self._counting, self._kernels = batch_counts, batch_split
        num_ranks = table.split["fed_by"].shape[1]
        self.batch = batch_split.BatchTensors(
            counts=self._counts,
            blocks=torch.zeros(
                (batch_counts.num_blocks(max_pairs), num_experts), dtype=int32, device=device
            ),
            starts=torch.zeros_like(self._counts),
            totals=torch.zeros_like(self._counts),
            sent=torch.zeros(num_sources, dtype=int32, device=device),
            up_to=torch.zeros(table.split["rank"].shape[1:], dtype=int32, device=device),
            rank_load=torch.zeros(num_ranks, device=device),
        )
        self._saved = torch.zeros(num_layers, device=device)
        self._seen = torch.zeros(num_layers, dtype=int32, device=device)
        self._passes = _Passes(self._seen, self._rule.num_off)
        self._layers = [
            batch_split.LayerSplit(**{name: one[layer] for name, one in table.split.items()})
            for layer in range(num_layers)
        ]

    def is_on(self, layer: int, experts: torch.Tensor) -> bool:
        """Whether this batch of a layer is split; alike on all sources.

        To be called once for each batch and layer, before ``slots``.
        """
        if not experts.is_cuda:
            switch = self._switches[layer]
            if not switch.is_on:
                self._switches[layer] = switch.after(0.0, self._rule)
            return switch.is_on
        if torch.cuda.is_current_stream_capturing():
            return experts.numel() * len(self.gathered) >= self._rule.least_rows * self._num_slots
        return self._passes.is_on(layer)

    def slots(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Slots [T, K] for experts [T, K]; EMPTY for padding.

        Every source calls it for the same layers in the same order, as a dispatch. An id that is no
        expert's is EMPTY and counted in ``RoutingTable.strays``.
        """
        if not experts.is_cuda:
            return self._on_host(layer, experts)
        self.count(experts)
        if not isinstance(self._exchange, PeerCounts):
            self._exchange(self._counts, self.gathered)
        self.split(layer, self.gathered)
        return self.choose(layer, experts)

    def switches(self) -> list[SplitSwitch]:
        """Of each layer, whether its batches are split. Waits for the device."""
        if self._counts.is_cuda:
            both = zip(self._saved.tolist(), self._seen.tolist(), strict=True)
            return [SplitSwitch(saved, seen) for saved, seen in both]
        return list(self._switches)

    def count(self, experts: torch.Tensor) -> None:
        """First part on a device: this source's counts, which peers get or are exchanged next."""
        exchange = self._exchange
        if isinstance(exchange, PeerCounts):
            exchange.check(len(self.batch.sent), len(self._counts))
            self._counting.count_experts(
                experts,
                self.batch.blocks,
                self._counts,
                turn=exchange.tensors.turn,
                peers=exchange.tensors.peers,
                source=self.source,
            )
        else:
            self._counting.count_experts(experts, self.batch.blocks, self._counts)

    def split(self, layer: int, gathered: torch.Tensor) -> None:
        """Second part on a device: where each replica's tokens end, in ``batch.up_to``."""
        exchange = self._exchange
        self._kernels.split_batch(
            self._layers[layer],
            self.batch,
            (self._saved[layer:], self._seen[layer:]),
            self.source,
            exchanged=exchange.tensors if isinstance(exchange, PeerCounts) else gathered,
            rule=self._rule,
        )

    def choose(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Third part on a device: the slots."""
        chosen, table = torch.empty_like(experts), self.table
        self._kernels.choose_by_split(
            self._layers[layer],
            (table.slots[layer], table.cumulative[layer]),
            experts,
            self.batch,
            chosen,
            table.strays,
        )
        return chosen

    def by_source(self) -> torch.Tensor:
        """[N, E] counts of each source in this batch, or [N, 1], their sums."""
        if isinstance(self._exchange, PeerCounts):
            return self.batch.sent[:, None]
        return self.gathered

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
        assert not isinstance(self._exchange, PeerCounts), "refused when this was made"
        self._exchange(self._counts, self.gathered)
        self.totals.copy_(self.gathered.sum(dim=0))
        self.starts.copy_(self.gathered[: self.source].sum(dim=0))
        layout, totals = self.layout(layer), self.totals.to(torch.int64)
        switch = self._switches[layer]
        rule = self._rule if switch.is_on else replace(self._rule, rounds=0)
        made = split_batch(totals.numpy(), layout, rule)
        self._switches[layer] = switch.after(made.saved, self._rule)
        self.rank_load.copy_(torch.from_numpy(made.rank_load))
        used = torch.where(is_expert, flat, 0)
        position = self.positions(experts).flatten()
        row = torch.from_numpy(layout.row.astype(np.int64))[used]
        size = (layout.rank >= 0).sum(axis=1)
        ends = np.floor(np.cumsum(made.tokens, axis=1) + 0.5)
        ends[np.arange(ends.shape[1]) + 1 >= size[:, None]] = NO_END
        self.up_to.copy_(torch.from_numpy(ends))
        way = (torch.from_numpy(ends)[row.clamp(min=0)] <= position[:, None]).sum(dim=1)
        slot = torch.from_numpy(layout.slot)[row.clamp(min=0), way.clamp(max=ends.shape[1] - 1)]
        draw = (position * SHARE_ONE // totals[used].clamp(min=1)).clamp(max=SHARE_ONE - 1)
        replica = (draw[:, None] >= table.cumulative[layer][used]).sum(dim=1)
        planned = table.slots[layer][used, torch.where(row == PLANNED, replica, 0)]
        chosen = torch.where(row >= 0, slot, planned).to(torch.int64)
        return chosen.masked_fill_(~is_expert, EMPTY).view_as(experts)


class _Passes:
    """Which layers an eager pass leaves out: by the switches as they stood LAG passes ago.

    The device decides by the counts that all ranks have alike, so every rank reads the same
    switches after the same pass, and none waits for its device to do so.
    """

    LAG = 2

    def __init__(self, seen: torch.Tensor, num_off: int) -> None:
        self._seen, self._num_off = seen, max(num_off, self.LAG + 1)
        self._copies = [torch.zeros(len(seen), dtype=seen.dtype).pin_memory() for _ in range(3)]
        self._arrived: list[Completion | None] = [None] * len(self._copies)
        self._until = [0] * len(seen)  # the pass that splits the layer again
        self._number, self._first = 0, -1

    def is_on(self, layer: int) -> bool:
        """Whether this pass splits the layer; a call for the first layer begins a pass."""
        if self._first < 0:
            self._first = layer
        if layer == self._first:
            self._begin()
        return self._number >= self._until[layer]

    def _begin(self) -> None:
        self._number += 1
        at, before = (
            number % len(self._copies) for number in (self._number, self._number - self.LAG)
        )
        self._copies[at].copy_(self._seen, non_blocking=True)
        self._arrived[at] = Completion(is_cuda=True)
        arrived = self._arrived[before]
        if arrived is None:
            return
        arrived.wait()
        for layer, seen in enumerate(self._copies[before].tolist()):
            if seen < 0 and self._number >= self._until[layer]:
                self._until[layer] = self._number + self._num_off
                self._seen[layer].zero_()  # on again when it is split the next time
