"""Replicas chosen by the batch's own counts, between the router and the dispatch.

    router -> count -> exchange of counts [E] -> split -> slots -> dispatch

A plan from history knows the experts' mean load, and a batch differs from it. The replicas that the
placement has are split anew for each batch and layer, by the counts of all ranks. No weight moves.

``make_split`` makes it as a deployment's switches (``eplb.shares.switches``) say. Every rank splits
by what it gathered. Were the counts of two ranks to differ, tokens would still go
to replicas of their expert: the balance suffers, the output does not.

Shapes:  L MoE layers, E experts, N sources (ranks that route), T tokens, K top-k, R ranks,
         M experts that are split, W ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY
from eplb.errors import ConfigError, RankError
from eplb.shares.switches import LATE_COUNTS, BatchSwitches
from runtime.batch.counts import BatchTensors, Exchange, PeerCounts, all_gather_counts
from runtime.batch.split_rule import PLANNED, SplitLayout, SplitRule, SplitSwitch, split_batch
from runtime.group import first_refusal, gathered
from runtime.routing import SHARE_ONE, RoutingTable, position_among_equals
from runtime.streams import Completion

NO_END = 2**31 - 1  # where the last way ends: no position is past it


class BatchSplit:
    """Chooses the slot of every token by the counts of the batch.

    Buffers have fixed addresses and shapes, for CUDA graphs. A layer whose batches gain too little
    follows the planned shares for a while: ``SplitSwitch``. An eager pass leaves such a layer's
    split out then, with its exchange; a captured one leaves out its rounds.

    Args:
        table: this rank's, made with a topology.
        exchange: gathers the counts of all sources.
        source: this rank among them.
        num_sources: N.
        max_pairs: most tokens times top-k of a batch.
        rule: alike on all ranks; None: the default one.

    Raises:
        ConfigError: the table was made without a topology, or peers exchange counts on a CPU or
            have words of other sizes.
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
        if not table.split:
            raise ConfigError("the routing table has no topology, expected one to split batches")
        self.table, self._exchange, self.source = table, exchange, source
        self._rule = rule or SplitRule()
        num_layers, num_experts = table.slots.shape[:2]
        device, is_cuda = table.slots.device, table.slots.is_cuda
        if isinstance(exchange, PeerCounts):
            if not is_cuda:
                raise ConfigError("found peer memory on a CPU, expected an exchange over a group")
            found, wanted = list(exchange.words.shape), [2, num_experts + num_sources]
            if found != wanted or len(exchange.peers) != num_sources:
                raise ConfigError(
                    f"found words {found} of {len(exchange.peers)} ranks, expected {wanted} of "
                    f"{num_sources}"
                )
        self._switches = [SplitSwitch()] * num_layers
        self._num_slots = table.split["fed_by"][0].numel()
        num_blocks = 0
        if is_cuda:
            from runtime.batch.kernels import counts, split

            self._counting, self._kernels = counts, split
            num_blocks = counts.num_blocks(max_pairs)
            self._saved = torch.zeros(num_layers, device=device)
            self._seen = torch.zeros(num_layers, dtype=torch.int32, device=device)
            self._passes = _BatchPasses(self._seen, self._rule.num_off)
            self._layers = [
                {name: one[layer] for name, one in table.split.items()}
                for layer in range(num_layers)
            ]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.gathered = zeros(num_sources, num_experts)
        self.batch = BatchTensors(
            counts=zeros(num_experts),
            blocks=zeros(num_blocks, num_experts),
            starts=zeros(num_experts),
            totals=zeros(num_experts),
            sent=zeros(num_sources),
            up_to=zeros(*table.split["rank"].shape[1:]),
            rank_load=torch.zeros(table.split["fed_by"].shape[1], device=device),
        )

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
        return (self._on_device if experts.is_cuda else self._on_host)(layer, experts)

    def switches(self) -> list[SplitSwitch]:
        """For each layer, whether its batches are split. Waits for the device."""
        if self.gathered.is_cuda:
            both = zip(self._saved.tolist(), self._seen.tolist(), strict=True)
            return [SplitSwitch(saved, seen) for saved, seen in both]
        return list(self._switches)

    @property
    def faults(self) -> Mapping[str, torch.Tensor]:
        """Faults that the device counts without stopping, each [1] int32.

        LATE_COUNTS: exchanges that missed their deadline.
        """
        exchange = self._exchange
        return {LATE_COUNTS: exchange.late} if isinstance(exchange, PeerCounts) else {}

    def layout(self, layer: int) -> SplitLayout:
        """The layout of a layer as the table has it now, on a CPU."""
        named = {name: one[layer].cpu().numpy() for name, one in self.table.split.items()}
        return SplitLayout(**{name: one for name, one in named.items() if name != "num_turns"})

    def positions(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, K] numbers of the tokens among all sources' tokens of their expert, on a CPU."""
        is_expert = (experts >= 0) & (experts < len(self.batch.totals))
        used = torch.where(is_expert, experts, 0)
        nth, _ = position_among_equals(torch.where(is_expert, experts, EMPTY).flatten())
        return self.batch.starts.to(torch.int64)[used] + nth.view_as(experts)

    def _on_device(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        batch, table, split = self.batch, self.table, self._layers[layer]
        exchanged: torch.Tensor | PeerCounts
        if isinstance(self._exchange, PeerCounts):
            exchanged = self._exchange
            self._counting.count_experts(
                experts,
                batch.blocks,
                batch.counts,
                turn=exchanged.turn,
                peers=exchanged.peers,
                source=self.source,
            )
        else:
            exchanged = self.gathered
            self._counting.count_experts(experts, batch.blocks, batch.counts)
            self._exchange(batch.counts, self.gathered)
        switch = self._saved[layer:], self._seen[layer:]
        self._kernels.split_batch(
            split, batch, switch, self.source, exchanged=exchanged, rule=self._rule
        )
        chosen = torch.empty_like(experts)
        replicas = table.slots[layer], table.cumulative[layer]
        self._kernels.choose_by_split(split, replicas, experts, batch, chosen, table.strays)
        return chosen

    def _on_host(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        table, batch = self.table, self.batch
        num_experts = table.slots.shape[1]
        flat = experts.flatten()
        is_expert = (flat >= 0) & (flat < num_experts)
        table.strays += (flat >= num_experts).sum()
        batch.counts.copy_(torch.bincount(flat[is_expert], minlength=num_experts))
        assert not isinstance(self._exchange, PeerCounts), "refused when this was made"
        self._exchange(batch.counts, self.gathered)
        batch.totals.copy_(self.gathered.sum(dim=0))
        batch.starts.copy_(self.gathered[: self.source].sum(dim=0))
        layout, totals = self.layout(layer), batch.totals.to(torch.int64)
        switch = self._switches[layer]
        rule = self._rule if switch.is_on else replace(self._rule, rounds=0)
        made = split_batch(totals.numpy(), layout, rule)
        self._switches[layer] = switch.after(made.saved, self._rule)
        batch.rank_load.copy_(torch.from_numpy(made.rank_load))
        used = torch.where(is_expert, flat, 0)
        position = self.positions(experts).flatten()
        row = torch.from_numpy(layout.row.astype(np.int64))[used]
        size = (layout.rank >= 0).sum(axis=1)
        ends = np.floor(np.cumsum(made.tokens, axis=1) + 0.5)
        ends[np.arange(ends.shape[1]) + 1 >= size[:, None]] = NO_END
        batch.up_to.copy_(torch.from_numpy(ends))
        way = (torch.from_numpy(ends)[row.clamp(min=0)] <= position[:, None]).sum(dim=1)
        slot = torch.from_numpy(layout.slot)[row.clamp(min=0), way.clamp(max=ends.shape[1] - 1)]
        draw = (position * SHARE_ONE // totals[used].clamp(min=1)).clamp(max=SHARE_ONE - 1)
        replica = (draw[:, None] >= table.cumulative[layer][used]).sum(dim=1)
        planned = table.slots[layer][used, torch.where(row == PLANNED, replica, 0)]
        chosen = torch.where(row >= 0, slot, planned).to(torch.int64)
        return chosen.masked_fill_(~is_expert, EMPTY).view_as(experts)


class _BatchPasses:
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


def make_split(
    switches: BatchSwitches,
    table: RoutingTable,
    source: int,
    tokens: dist.ProcessGroup,
    control: dist.ProcessGroup,
    *,
    max_pairs: int,
    rule: SplitRule | None = None,
) -> BatchSplit | None:
    """Make the split of batches where it is on; collective, before the rank serves.

    Args:
        switches: alike on all ranks.
        table: this rank's.
        source: this rank.
        tokens: group of all ranks, which gathers the counts.
        control: group of all ranks, in which they agree before they serve.
        max_pairs: most tokens times top-k of a batch.
        rule: alike on all ranks; None: the default one.

    Raises:
        ConfigError: the switches do not fit the device; on every rank if on one.
        RankError: ranks have different switches or rules.
    """
    rule = rule or SplitRule()
    texts = gathered([repr(switches), repr(rule)], control)
    for other, found in enumerate(texts):
        for name, one, first in zip(("switches", "rules"), found, texts[0], strict=True):
            if one != first:
                raise RankError(
                    f"the batch {name} of the ranks differ: found {one} on rank {other}, "
                    f"expected {first} as on rank 0"
                )
    misfit = ""
    if switches.exchange == "peer_memory" and table.device.type != "cuda":
        misfit = 'batch.exchange is "peer_memory" on a CPU, expected "group"'
    if wrong := first_refusal(misfit, control):
        raise ConfigError(wrong)
    if not switches.split:
        return None
    exchange: Exchange | PeerCounts = all_gather_counts(tokens)
    if switches.exchange == "peer_memory":
        exchange = PeerCounts.join(table.slots.shape[1], tokens, table.device)
    return BatchSplit(
        table, exchange, source=source, num_sources=tokens.size(), max_pairs=max_pairs, rule=rule
    )
